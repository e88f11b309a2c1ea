"""Launches of the matrix kernels of the two passes: arguments, grids, tiles."""

from typing import NamedTuple

from torch import Tensor

from ..kernels.dlogits import dlogits_kernel
from ..kernels.merge import WARPS, merge_kernel
from ..kernels.primitives import TRITON_DTYPES, fits_descriptor, operand_dtype, tile_source
from ..kernels.score import score_kernel
from ..kernels.tiles import Tile, precision, programs, tile_for
from .contract import Head, Saved, Scores, Want
from .triton_call import call


class Part(NamedTuple):
    """Active rows that are scored by one launch."""

    hidden: Tensor
    """[n, H]: head.hidden[start : start + n], or if there is a mask a copy of the active rows
    start.. of it, of which there may be fewer."""
    start: int
    rows: Tensor | None
    active: Tensor | None
    """Numbers of all active rows, and on the device how many there are; None without a mask."""
    partials: Tensor
    """[n, quantities, column tiles], what score leaves for merge."""
    tile: Tile
    want: Want


class Rows(NamedTuple):
    """The rows that pass 2 computes, and what it knows about them."""

    hidden: Tensor
    """[n, H] in the compute dtype."""
    kept: Tensor | None
    """How many of them there are, on the device, where the host does not know it yet; else None."""
    saved: Saved
    grads: tuple[Tensor | None, Tensor | None]
    """(grad_logps, grad_entropies), contiguous [N] or None."""
    rows: Tensor | None
    positions: Tensor | None
    """Numbers of these rows, and their positions, as kernels/rows.py; None if all are here."""
    alpha: float
    unscale: Tensor | None
    """What dx is to be multiplied by: alpha, known on the host, and unscale, on the device."""


def score(head: Head, part: Part) -> None:
    """Fill the part's partials."""
    hidden, tile = part.hidden, part.tile
    n, vocab_size = hidden.shape[0], head.vocab_size
    hidden_tma, weight_tma = fits_descriptor(hidden), fits_descriptor(head.weight)
    temperature = head.inverse_temperature
    call(
        score_kernel,
        programs(hidden.device),
        (
            tile_source(hidden, [tile.rows, tile.depth], hidden_tma),
            tile_source(head.weight, [tile.columns, tile.depth], weight_tma),
            head.bias,
            head.logit_scale,
            head.softcap,
            temperature,
            part.rows,
            part.active,
            part.partials,
        ),
        (
            part.start,
            n,
            vocab_size,
            hidden.shape[1],
            *hidden.stride(),
            *head.weight.stride(),
            0 if temperature is None or temperature.ndim == 0 else temperature.stride(0),
            *part.partials.stride()[:2],
        ),
        {
            "WITH_ENTROPY": part.want.entropy,
            "WITH_STATISTICS": part.want.statistics,
            "EVEN_V": vocab_size % tile.columns == 0,
            "DTYPE": TRITON_DTYPES[head.compute_dtype],
            "OPERAND": operand_dtype(hidden.device, head.compute_dtype),
            "PRECISION": precision(hidden.device, head.compute_dtype),
            "BLOCK_N": tile.rows,
            "BLOCK_V": tile.columns,
            "BLOCK_H": tile.depth,
            "GROUP": tile.group,
            "HIDDEN_TMA": hidden_tma,
            "WEIGHT_TMA": weight_tma,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def merge(head: Head, part: Part, ids: Tensor, scores: Scores) -> None:
    """Write the scores of the part's rows, at their tokens; ids is [N]."""
    hidden = part.hidden
    temperature = head.inverse_temperature
    call(
        merge_kernel,
        hidden.shape[0],
        (
            hidden,
            head.weight,
            head.bias,
            head.logit_scale,
            head.softcap,
            temperature,
            part.rows,
            part.active,
            ids,
            part.partials,
            *scores[:5],
            scores.statistics if part.want.statistics else None,
        ),
        (
            part.start,
            ids.shape[0],
            head.vocab_size,
            hidden.shape[1],
            -(-head.vocab_size // part.tile.columns),
            *hidden.stride(),
            *head.weight.stride(),
            0 if temperature is None or temperature.ndim == 0 else temperature.stride(0),
            ids.stride(0),
            *part.partials.stride()[:2],
            scores.statistics.stride(0),
        ),
        {
            "WITH_ENTROPY": part.want.entropy,
            "DTYPE": TRITON_DTYPES[head.compute_dtype],
            "BLOCK": 32 * WARPS,
        },
        warps=WARPS,
    )


def dlogits(head: Head, work: Rows, weight: Tensor, out: Tensor, at: tuple[int, int]) -> None:
    """out [n, c] = dx of work's rows and the vocabulary's columns from `at` on.

    weight [c, H] is head.weight from that column on, in the compute dtype. With work.kept, out is
    flat memory for a block of the first columns, as many as `fitting_columns` says.
    """
    start, column_start = at
    tile = tile_for(out.device, head.compute_dtype)
    hidden = work.hidden if out.dim() == 1 else work.hidden[start : start + out.shape[0]]
    hidden_tma, weight_tma = fits_descriptor(hidden), fits_descriptor(weight)
    out_tma = out.dim() == 2 and fits_descriptor(out)
    temperature = head.inverse_temperature
    call(
        dlogits_kernel,
        programs(out.device),
        (
            tile_source(hidden, [tile.rows, tile.depth], hidden_tma),
            tile_source(weight, [tile.columns, tile.depth], weight_tma),
            tile_source(out, [tile.rows, tile.columns // 2], out_tma),
            head.bias,
            head.logit_scale,
            head.softcap,
            temperature,
            work.rows,
            work.kept,
            work.saved.action_ids,
            work.saved.max,
            work.saved.log_sum,
            work.saved.entropies,
            *work.grads,
        ),
        (
            start,
            column_start,
            out.numel() if out.dim() == 1 else 0,
            hidden.shape[0],
            weight.shape[0],
            hidden.shape[1],
            *hidden.stride(),
            *weight.stride(),
            0 if temperature is None or temperature.ndim == 0 else temperature.stride(0),
            out.stride(0),
        ),
        {
            "DTYPE": TRITON_DTYPES[head.compute_dtype],
            "OPERAND": operand_dtype(out.device, head.compute_dtype),
            "PRECISION": precision(out.device, head.compute_dtype),
            "BLOCK_N": tile.rows,
            "BLOCK_V": tile.columns,
            "BLOCK_H": tile.depth,
            "GROUP": tile.group,
            "HIDDEN_TMA": hidden_tma,
            "WEIGHT_TMA": weight_tma,
            "OUT_TMA": out_tma,
        },
        warps=tile.warps,
        stages=tile.stages,
    )

"""Launches of the two passes' kernels: arguments, grids, tiles."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..kernels.dlogits import dlogits_kernel
from ..kernels.merge import WARPS, merge_kernel
from ..kernels.primitives import TRITON_DTYPES, fits_descriptor, operand_dtype, tile_source
from ..kernels.rows import (
    gather_kernel,
    list_active_kernel,
    list_kept_kernel,
    scatter_kernel,
)
from ..kernels.score import score_kernel
from ..kernels.tiles import Tile, precision, programs, tile_for
from .contract import Head, Saved, Scores, Want
from .triton_call import call

LISTED_AT_ONCE = 8192
"""Rows that the one program of a listing looks at in a step."""


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


def list_active(
    mask: Tensor | None, ids: Tensor, scores: Scores, vocab_size: int
) -> tuple[Tensor | None, Tensor | None]:
    """(rows, count) of the active rows, None without a mask.

    Also writes the zeros of the inactive rows into scores, and its count of bad ids.
    """
    N = ids.shape[0]
    rows = count = None
    if mask is not None:
        rows = torch.empty(N, dtype=torch.int32, device=ids.device)
        count = torch.empty(1, dtype=torch.int32, device=ids.device)
    call(
        list_active_kernel,
        1,
        (
            None if mask is None else mask.view(torch.int8),
            ids,
            rows,
            count,
            *scores[:5],
            N,
            vocab_size,
            0 if mask is None else mask.stride(0),
            ids.stride(0),
        ),
        {"WITH_ENTROPY": scores.entropies.numel() > 0, "BLOCK_N": LISTED_AT_ONCE},
        warps=8,
    )
    return rows, count


def list_kept(grads: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, positions, count) of the rows with a gradient that is not zero (NaN is not)."""
    like = next(grad for grad in grads if grad is not None)
    N, device = like.shape[0], like.device
    rows, positions = (torch.empty(N, dtype=torch.int32, device=device) for _ in range(2))
    count = torch.empty(1, dtype=torch.int32, device=device)
    arguments = (*grads, rows, positions, count, N)
    call(list_kept_kernel, 1, arguments, {"BLOCK_N": LISTED_AT_ONCE}, warps=8)
    return rows, positions, count


def gather_rows(matrix: Tensor, rows: Tensor, count: Tensor, out: Tensor, start: int = 0) -> None:
    """out[i] = matrix[rows[start + i]] while start + i < count (on the device), in out's dtype."""
    n, H = out.shape
    arguments = (matrix, rows, count, out, start, H, *matrix.stride())
    call(gather_kernel, n, arguments, {"BLOCK_H": 1024})


def scatter_rows(matrix: Tensor, positions: Tensor, out: Tensor) -> None:
    """out[n] = matrix[positions[n]], 0 where that is -1, in out's dtype."""
    N, H = out.shape
    arguments = (matrix, positions, out, H, matrix.stride(0))
    call(scatter_kernel, N, arguments, {"BLOCK_H": 1024})


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
            *scores[:4],
            scores.statistics if part.want.statistics else None,
            part.start,
            head.vocab_size,
            hidden.shape[1],
            triton.cdiv(head.vocab_size, part.tile.columns),
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

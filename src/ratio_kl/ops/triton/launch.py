"""Launches of the matrix kernels of the two passes: arguments, grids, tiles."""

from typing import NamedTuple

from torch import Tensor

from ...kernels.dlogits import dlogits_kernel
from ...kernels.merge import WARPS, merge_kernel
from ...kernels.primitives import TRITON_DTYPES, fits_descriptor, operand_dtype
from ...kernels.score import score_kernel
from ...kernels.tiles import Tile, precision, programs, tile_for
from ..contract import Head, Saved, Scores, Want
from .call import Arguments, Sources, call
from .lists import Grads


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
    saved: Saved
    grads: Grads
    rows: Tensor | None = None
    positions: Tensor | None = None
    """Numbers of these rows, and their positions, as kernels/rows.py; None if all are here."""
    kept: Tensor | None = None
    """How many of them there are, on the device, where the host does not know it yet; else None."""
    alpha: float = 1.0
    unscale: Tensor | None = None
    """What dx is to be multiplied by: alpha, known on the host, and unscale, on the device."""
    has_blanks: bool = False
    """Rows without a gradient are among them. Their dx is to be 0."""


def score(head: Head, part: Part) -> None:
    """Fill the part's partials."""
    tile = part.tile
    rounding = precision(part.hidden.device, head.compute_dtype)

    def arguments() -> Arguments:
        hidden, weight = part.hidden, head.weight
        hidden_tma, weight_tma = fits_descriptor(hidden), fits_descriptor(weight)
        return Arguments(
            programs(hidden.device),
            (
                part.start,
                hidden.shape[0],
                head.vocab_size,
                hidden.shape[1],
                *hidden.stride(),
                *weight.stride(),
                _row_stride(head.inverse_temperature),
                *part.partials.stride()[:2],
            ),
            {
                "WITH_ENTROPY": part.want.entropy,
                "WITH_STATISTICS": part.want.statistics,
                "EVEN_V": head.vocab_size % tile.columns == 0,
                **_of_product(head, tile, rounding),
                "HIDDEN_TMA": hidden_tma,
                "WEIGHT_TMA": weight_tma,
            },
            (
                [tile.rows, tile.depth] if hidden_tma else None,
                [tile.columns, tile.depth] if weight_tma else None,
            ),
            tile.warps,
            tile.stages,
        )

    sources = (*_operands(head, part), part.partials)
    key = head.layout, part.start, part.hidden.shape[0], part.want, tile, rounding
    call(score_kernel, key, sources, arguments)


def merge(head: Head, part: Part, ids: Tensor, scores: Scores) -> None:
    """Write the scores of the part's rows, at their tokens; ids is [N]."""
    want = part.want

    def arguments() -> Arguments:
        return Arguments(
            part.hidden.shape[0],
            (
                part.start,
                ids.shape[0],
                head.vocab_size,
                part.hidden.shape[1],
                -(-head.vocab_size // part.tile.columns),
                *part.hidden.stride(),
                *head.weight.stride(),
                _row_stride(head.inverse_temperature),
                ids.stride(0),
                *part.partials.stride()[:2],
                scores.statistics.stride(0),
            ),
            {
                "WITH_ENTROPY": want.entropy,
                "DTYPE": TRITON_DTYPES[head.compute_dtype],
                "BLOCK": 32 * WARPS,
            },
            warps=WARPS,
        )

    sources = (
        *_operands(head, part),
        ids,
        part.partials,
        *scores[:5],
        scores.statistics if want.statistics else None,
    )
    key = (
        head.layout,
        part.start,
        part.hidden.shape[0],
        want,
        part.tile,
        ids.dtype,
        ids.stride(0),
    )
    call(merge_kernel, key, sources, arguments)


def dlogits(head: Head, work: Rows, weight: Tensor, out: Tensor, at: tuple[int, int]) -> None:
    """out [n, c] = dx of work's rows and the vocabulary's columns from `at` on.

    weight [c, H] is head.weight from that column on, in the compute dtype. With work.kept, out is
    flat memory for a block of the first columns, as many as `fitting_columns` says.
    """
    start, column_start = at
    hidden, n = work.hidden, out.shape[0]
    if out.dim() == 2 and n < hidden.shape[0]:
        hidden = hidden[start : start + n]
    rounding = precision(out.device, head.compute_dtype)

    def arguments() -> Arguments:
        tile = tile_for(out.device, head.compute_dtype)
        hidden_tma, weight_tma = fits_descriptor(hidden), fits_descriptor(weight)
        out_tma = out.dim() == 2 and fits_descriptor(out)
        return Arguments(
            programs(out.device),
            (
                start,
                column_start,
                out.numel() if out.dim() == 1 else 0,
                hidden.shape[0],
                weight.shape[0],
                hidden.shape[1],
                *hidden.stride(),
                *weight.stride(),
                _row_stride(head.inverse_temperature),
                out.stride(0),
            ),
            {
                **_of_product(head, tile, rounding),
                "HIDDEN_TMA": hidden_tma,
                "WEIGHT_TMA": weight_tma,
                "OUT_TMA": out_tma,
                "HAS_BLANKS": work.has_blanks,
            },
            (
                [tile.rows, tile.depth] if hidden_tma else None,
                [tile.columns, tile.depth] if weight_tma else None,
                [tile.rows, tile.columns // 2] if out_tma else None,
            ),
            tile.warps,
            tile.stages,
        )

    sources = (
        hidden,
        weight,
        out,
        head.bias,
        head.logit_scale,
        head.softcap,
        head.inverse_temperature,
        work.rows,
        work.kept,
        work.saved.action_ids,
        work.saved.max,
        work.saved.log_sum,
        work.saved.entropies,
        *work.grads,
    )
    layouts = hidden.shape, hidden.stride(), weight.shape, weight.stride(), out.shape, out.stride()
    key = head.layout, work.saved.action_ids.dtype, work.has_blanks, *layouts, at, rounding
    call(dlogits_kernel, key, sources, arguments)


def _operands(head: Head, part: Part) -> Sources:
    """What both kernels of pass 1 read, in their order."""
    return (
        part.hidden,
        head.weight,
        head.bias,
        head.logit_scale,
        head.softcap,
        head.inverse_temperature,
        part.rows,
        part.active,
    )


def _of_product(head: Head, tile: Tile, rounding: str) -> dict[str, object]:
    """What a kernel is compiled for, of those that multiply tiles of hidden and weight."""
    device, dtype = head.hidden.device, head.compute_dtype
    return {
        "DTYPE": TRITON_DTYPES[dtype],
        "OPERAND": operand_dtype(device, dtype),
        "PRECISION": rounding,
        "BLOCK_N": tile.rows,
        "BLOCK_V": tile.columns,
        "BLOCK_H": tile.depth,
        "GROUP": tile.group,
    }


def _row_stride(temperature: Tensor | None) -> int:
    """Between the temperatures of two rows; 0 where they share one."""
    return 0 if temperature is None or temperature.ndim == 0 else temperature.stride(0)

"""Tiles of rows x vocabulary: how large they may be, and the logits of one of them."""

import torch
from torch import Tensor

from ..contract import Head

_SMALLEST = 64
_PREFERRED_ROWS = 1024


def plan_tiles(
    rows: int,
    columns: int,
    *,
    budget: int,
    element_bytes: int,
    row_bytes: int = 0,
    column_bytes: int = 0,
) -> tuple[int, int]:
    """Steps (rows, columns) of a tile whose temporaries stay within `budget` bytes.

    A tile of r rows and c columns costs `r * c * element_bytes + r * row_bytes + c * column_bytes`.
    Wide tiles are preferred, since each one rereads the rows' state; both steps are at least 1 and
    no budget is too small: below one tile of 64 x 64 the smallest tile is used.
    """
    row_step = max(1, min(rows, _PREFERRED_ROWS))
    column_step = _affordable(budget, row_step, element_bytes, row_bytes, column_bytes)
    while column_step < min(columns, _SMALLEST) and row_step > _SMALLEST:
        row_step = max(_SMALLEST, row_step // 2)
        column_step = _affordable(budget, row_step, element_bytes, row_bytes, column_bytes)
    if column_step >= columns:
        column_step = max(1, columns)
        affordable = _affordable(budget, column_step, element_bytes, column_bytes, row_bytes)
        return max(row_step, min(rows, affordable)), column_step
    return row_step, max(_SMALLEST, column_step // _SMALLEST * _SMALLEST)


def _affordable(
    budget: int, step: int, element_bytes: int, step_bytes: int, unit_bytes: int
) -> int:
    """How many units of the other side fit beside `step` units of this one."""
    return (budget - step * step_bytes) // (step * element_bytes + unit_bytes)


class LogitTiles:
    """The modified logits of the selected rows, one tile at a time in reused buffers."""

    def __init__(self, head: Head, rows: Tensor | None, *, buffers: int, sums: bool = False):
        self.head = head
        self.dtype = head.logits_dtype
        self.rows = rows
        self.count = head.hidden.shape[0] if rows is None else rows.shape[0]
        self.width = head.hidden.shape[1]
        # CUDA multiplies half precision with a float32 result; elsewhere operands are widened.
        on_cuda = head.hidden.device.type == "cuda"
        self.operand_dtype = head.compute_dtype if on_cuda else self.dtype
        self.inverse_temperature = head.inverse_temperature
        if self.inverse_temperature is not None and self.inverse_temperature.dim() == 1:
            self.inverse_temperature = select(self.inverse_temperature, rows)[:, None]
        size = self.dtype.itemsize
        sum_bytes = size * self.width if sums else 0
        self.row_step, self.column_step = plan_tiles(
            self.count,
            head.vocab_size,
            budget=head.chunk_bytes,
            element_bytes=buffers * size,
            row_bytes=self._row_bytes() + sum_bytes,
            column_bytes=self._cast_bytes(head.weight) + sum_bytes,
        )
        shape = (self.row_step * self.column_step,)
        self._buffer = torch.empty(shape, dtype=self.dtype, device=head.hidden.device)
        self.scratch = torch.empty_like(self._buffer)

    def _cast_bytes(self, operand: Tensor) -> int:
        cast = operand.dtype != self.operand_dtype
        return self.operand_dtype.itemsize * self.width if cast else 0

    def _row_bytes(self) -> int:
        hidden = self.head.hidden
        picked = 0 if self.rows is None else hidden.dtype.itemsize * self.width
        return picked + self._cast_bytes(hidden)

    def row_blocks(self) -> list[slice]:
        return _blocks(self.count, self.row_step)

    def column_blocks(self) -> list[slice]:
        return _blocks(self.head.vocab_size, self.column_step)

    def walk(self, *, columns_outermost: bool) -> list[tuple[slice, slice]]:
        """All (rows, columns) tiles, with the chosen side in the outer loop."""
        if columns_outermost:
            return [(r, c) for c in self.column_blocks() for r in self.row_blocks()]
        return [(r, c) for r in self.row_blocks() for c in self.column_blocks()]

    def is_last(self, block: slice, columns: slice) -> bool:
        """Whether `walk` ends with this tile."""
        return block.stop == self.count and columns.stop == self.head.vocab_size

    def hidden(self, block: slice) -> Tensor:
        """The selected rows of a block: picked here, so that no copy of all of them exists."""
        hidden = self.head.hidden
        if self.rows is not None:
            return hidden.index_select(0, self.rows[block]).to(self.operand_dtype)
        return hidden[block].to(self.operand_dtype)

    def weight(self, columns: slice) -> Tensor:
        return self.head.weight[columns].to(self.operand_dtype)

    def temperature_factor(self, block: slice) -> Tensor | None:
        factor = self.inverse_temperature
        return factor if factor is None or factor.dim() == 0 else factor[block]

    def logits(self, block: slice, columns: slice, weight: Tensor) -> Tensor:
        """z of one tile, [rows, columns], in the first buffer: valid until the next call."""
        hidden = self.hidden(block)
        z = tile_view(self._buffer, hidden.shape[0], weight.shape[0])
        if hidden.dtype == self.dtype:
            torch.mm(hidden, weight.T, out=z)
        else:
            torch.mm(hidden, weight.T, out_dtype=self.dtype, out=z)
        head = self.head
        if head.bias is not None:
            z += head.bias[columns]
        if head.logit_scale is not None:
            z *= head.logit_scale
        if head.softcap is not None:
            z.div_(head.softcap).tanh_().mul_(head.softcap)
        factor = self.temperature_factor(block)
        return z if factor is None else z.mul_(factor)


def tile_view(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows * columns elements of a flat buffer as a contiguous matrix."""
    return buffer[: rows * columns].view(rows, columns)


def select(values: Tensor, rows: Tensor | None) -> Tensor:
    """The chosen rows of `values`; None chooses all and copies nothing."""
    return values if rows is None else values.index_select(0, rows)


def _blocks(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]

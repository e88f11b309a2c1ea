"""The matrix products of pass 2 in PyTorch, and a gradient as their sum over tiles."""

import torch
from torch import Tensor

from .tiling import LogitTiles


class RunningGradient:
    """A leaf's gradient, summed over tiles in the logits' dtype and rounded once.

    Where the gradient has that dtype, it is its own sum. Otherwise the sum is either whole
    (tiles of all blocks interleave) or one block long (all tiles of a block come in a row).
    Blocks count the selected rows of the leaf; all other rows of the gradient are 0.
    """

    def __init__(
        self,
        leaf: Tensor,
        dtype: torch.dtype,
        tiles: LogitTiles,
        whole: bool,
        rows: Tensor | None = None,
    ):
        self.rows = rows
        self.whole = whole
        self.open: slice | None = None
        self.result = leaf.new_zeros(leaf.shape, dtype=dtype)
        self.sum: Tensor | None = None
        if dtype != tiles.dtype:
            lines = leaf.shape[0] if rows is None else rows.shape[0]
            lines = lines if whole else min(max(tiles.row_step, tiles.column_step), lines)
            self.sum = leaf.new_zeros((lines, leaf.shape[1]), dtype=tiles.dtype)

    def add(self, block: slice, left: Tensor, right: Tensor) -> None:
        """gradient[block] += left @ right."""
        if self.sum is None and self.rows is not None:
            # Each row occurs once, so the order of additions is that of the tiles.
            self.result.index_add_(0, self.rows[block], _product(left, right, self.result.dtype))
            return
        if self.sum is None:
            target = self.result[block]
        elif self.whole:
            target = self.sum[block]
        else:
            if block != self.open:
                self._round_open_block()
                self.open = block
            target = self.sum[: block.stop - block.start]
        if left.dtype == target.dtype:
            target.addmm_(left, right)
        else:
            torch.addmm(target, left, right, out_dtype=target.dtype, out=target)

    def _round_open_block(self) -> None:
        if self.open is not None and self.sum is not None:
            self._round(self.open, self.sum[: self.open.stop - self.open.start])
            self.sum.zero_()

    def _round(self, block: slice, sums: Tensor) -> None:
        if self.rows is None:
            self.result[block] = sums
        else:
            self.result.index_copy_(0, self.rows[block], sums.to(self.result.dtype))

    def finish(self) -> Tensor:
        """The gradient."""
        if self.sum is not None and self.whole:
            self._round(slice(0, self.sum.shape[0]), self.sum)
        else:
            self._round_open_block()
        return self.result


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`: that of the operands, or wider on CUDA."""
    # With `out`, for autocast leaves that alone and would round the operands.
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    wider = {} if left.dtype == dtype else {"out_dtype": dtype}
    return torch.mm(left, right, **wider, out=out)

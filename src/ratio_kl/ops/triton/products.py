"""The two matrix products of pass 2, and their sums over blocks.

    d_hidden[n] += dx @ weight[v],   d_weight[v] += dx.T @ hidden[n],   d_bias[v] += sum_n dx

Every sum over blocks is kept in fp32 and rounded once.
"""

import torch
from torch import Tensor

from ..contract import Head, Needs
from .blocks import Plan
from .launch import Rows
from .lists import scatter_rows


class _Sum:
    """One gradient [lines, H], summed over products in fp32 and rounded once into `out`."""

    def __init__(self, out: Tensor, buffer: Tensor | None, spans: bool) -> None:
        """buffer: for the sum in fp32, or None: in place. spans: it holds all of out's lines, not
        one block's."""
        self.out, self.buffer, self.spans = out, buffer, spans

    def add(self, lines: slice, a: Tensor, b: Tensor, ends: tuple[bool, bool], by: Rows) -> None:
        """out[lines] += a @ b; ends: whether it is these lines' first product, and their last."""
        first, last = ends
        target = self.out[lines]
        if self.buffer is not None:
            target = self.buffer[lines] if self.spans else self.buffer[: lines.stop - lines.start]
        _multiply(target, a, b, by.alpha, accumulate=not first)
        if last and by.unscale is not None:
            target.mul_(by.unscale)
        if last and self.buffer is not None:
            self.out[lines].copy_(target)


def _multiply(out: Tensor, a: Tensor, b: Tensor, alpha: float, accumulate: bool) -> None:
    """out = alpha a @ b, plus out if accumulate; summed in fp32."""
    beta = int(accumulate)
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif a.is_cuda and not torch.version.hip:
        torch.addmm(out, a, b, torch.float32, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, alpha=alpha, out=out)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype."""
    # With `out`, for autocast leaves that alone and would round the operands.
    return torch.mm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))


def gradient_dtype(leaf: Tensor, needs: Needs) -> torch.dtype:
    """dtype of a leaf's gradient."""
    return torch.float32 if needs.in_logits_dtype else leaf.dtype


class Products:
    """The gradients, to which blocks are added in the order of their plan."""

    def __init__(
        self,
        head: Head,
        work: Rows,
        needs: Needs,
        blocks: Plan,
        *,
        hidden_dtype: torch.dtype,
        memory: Tensor | None,
    ) -> None:
        """memory: for the gradient of hidden, [N, H] of hidden_dtype; work's rows may lie in it."""
        self._head, self._work, self._needs, self._blocks = head, work, needs, blocks
        self._hidden_dtype, self._memory = hidden_dtype, memory
        self._n, self._vocab_size = work.hidden.shape[0], head.vocab_size
        self._d_weight = self._sum_of_weight() if needs.weight else None
        self._d_hidden = self._sum_of_hidden() if needs.hidden else None
        self._d_bias: Tensor | None = None
        if needs.bias:
            self._d_bias = head.weight.new_zeros(head.weight.shape[0], dtype=torch.float32)

    def add_to_hidden(self, block: tuple[slice, slice], dx: Tensor, weight: Tensor) -> None:
        """weight: of the block's columns, in the compute dtype."""
        rows, columns = block
        if self._d_hidden is not None:
            ends = columns.start == 0, columns.stop == self._vocab_size
            self._d_hidden.add(rows, dx, weight, ends, self._work)

    def add_to_weight(self, block: tuple[slice, slice], dx: Tensor) -> None:
        """And to bias."""
        rows, columns = block
        if self._d_weight is not None:
            ends = rows.start == 0, rows.stop == self._n
            self._d_weight.add(columns, dx.T, self._work.hidden[rows], ends, self._work)
        if self._d_bias is not None:
            self._d_bias[columns] += dx.sum(0, dtype=torch.float32)

    def of_hidden(self) -> Tensor | None:
        """The gradient of all rows of hidden. The rows that lie in its memory are lost."""
        if self._d_hidden is None:
            return None
        if self._work.positions is None:
            return self._d_hidden.out
        out, hidden = self._memory, self._head.hidden
        if out is None:
            out = hidden.new_empty(hidden.shape, dtype=self._hidden_dtype)
        scatter_rows(self._d_hidden.out, self._work.positions, out)
        return out

    def of_head(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias."""
        d_bias, work = self._d_bias, self._work
        if d_bias is not None and self._head.bias is not None:
            d_bias *= work.alpha if work.unscale is None else work.unscale
            d_bias = d_bias.to(gradient_dtype(self._head.bias, self._needs))
        return None if self._d_weight is None else self._d_weight.out, d_bias

    def _sum_of_hidden(self) -> _Sum:
        head, n, blocks = self._head, self._n, self._blocks
        H, one_part = head.hidden.shape[1], blocks.has_one_column_part(self._vocab_size)
        compact = self._work.positions is not None
        out = self._memory
        if out is None or compact:
            # What is spread over all rows later may stay fp32 until then.
            kind = torch.float32 if compact and not one_part else self._hidden_dtype
            out = head.hidden.new_empty((n, H), dtype=kind)
        lines = blocks.rows if blocks.rows_outermost else n
        buffer = self._buffer(out, lines, one_part, self._room(lines * H))
        return _Sum(out, buffer, spans=not blocks.rows_outermost)

    def _sum_of_weight(self) -> _Sum:
        head, blocks = self._head, self._blocks
        out = head.weight.new_empty(
            head.weight.shape, dtype=gradient_dtype(head.weight, self._needs)
        )
        out[self._vocab_size :].zero_()
        lines = self._vocab_size if blocks.rows_outermost else min(blocks.widest, self._vocab_size)
        buffer = self._buffer(out, lines, one_part=blocks.rows >= self._n)
        return _Sum(out, buffer, spans=blocks.rows_outermost)

    def _buffer(
        self, out: Tensor, lines: int, one_part: bool, room: Tensor | None = None
    ) -> Tensor | None:
        """Memory for a sum of so many lines, None where `out` itself will do."""
        direct = one_part and self._work.unscale is None and out.dtype == self._head.compute_dtype
        if direct or out.dtype == torch.float32:
            return None
        shape = lines, out.shape[1]
        return out.new_empty(shape, dtype=torch.float32) if room is None else room.view(shape)

    def _room(self, numbers: int) -> Tensor | None:
        """fp32 memory in d_weight, where its last block is to be written: free until the sum of
        d_hidden has been rounded, if that is not to wait for d_weight. None if it is too small.
        """
        d_weight, blocks = self._d_weight, self._blocks
        written_once = blocks.rows >= self._n and not blocks.rows_outermost
        if d_weight is None or d_weight.buffer is not None or not written_once:
            return None
        if self._work.positions is not None:
            return None
        *_, (_, columns) = blocks.walk(self._n, self._vocab_size)
        free = d_weight.out[columns].view(-1).view(torch.uint8)
        start = (free.numel() - 4 * numbers) // 16 * 16
        return free[start : start + 4 * numbers].view(torch.float32) if start >= 0 else None

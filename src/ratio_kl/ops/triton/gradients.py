"""Pass 2 of the Triton backend: blocks of dx, and what is launched while the host waits.

    for each block of rows n and columns v:   dx = kernels/dlogits.py
        d_hidden[n] += dx @ weight[v],   d_weight[v] += dx.T @ hidden[n],   d_bias[v] += sum_n dx

Of the two gradients the larger one is cut by the outer loop, so that only the smaller one needs an
fp32 copy of its whole size.

The host must know how many rows have a gradient before it can launch a matrix product. Reading
that and launching takes it longer than a small kernel runs, so the first block's dx, whose kernel
reads the count on the device, is launched before: the device computes while the host waits. Where
there is little to compute, and while a graph is captured, all rows are, and the host reads nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.primitives import ALIGNED
from ...kernels.tiles import programs, tile_for
from ..contract import Gradients, Head, HiddenDone, Needs, Saved
from .blocks import Plan, Side, fitting_columns, plan
from .launch import Rows, dlogits
from .lists import Grads, gather_rows
from .products import Products, gradient_dtype, product
from .rows import Listed, all_rows, list_rows, listed_rows

SMALL = 2**33
"""Up to so many multiplications of a matrix product all rows are computed: 25 us on an H200, where
listing rows, telling the host and picking them out take longer than three such products."""


class _Ahead(NamedTuple):
    """What was launched before the number of rows is known."""

    d_hidden: Tensor
    """[N, H], to be written last: the rows' copy lies there."""
    hidden: Tensor
    """[N, H]: begins with the rows."""
    most_columns: int
    """The block's memory holds dx of as many of these as fit there beside each other."""


class _Space:
    """Memory for one block of dx at a time."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.memory = like.new_empty(0, dtype=dtype)

    def flat(self, elements: int) -> Tensor:
        """So many elements, or more. It is the last block's memory if that is enough."""
        if self.memory.numel() < elements:
            self.memory = self.memory.new_empty(0)  # free before more is taken
            self.memory = self.memory.new_empty(elements)
        return self.memory

    def block(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], each row aligned."""
        width = _aligned(columns)
        return self.flat(rows * width)[: rows * width].view(rows, width)[:, :columns]


def _aligned(columns: int) -> int:
    """Elements between the rows of a block of so many columns."""
    return -(-columns // ALIGNED.value) * ALIGNED.value


def gradients(
    head: Head,
    saved: Saved,
    grads: Grads,
    needs: Needs,
    hidden_done: HiddenDone | None = None,
) -> Gradients:
    """Pass 2, as linear.backward says; grads are contiguous."""
    if needs.bias and head.bias is None:
        needs = needs._replace(bias=False)
    if all(grad is None for grad in grads) or head.hidden.shape[0] == 0 or not any(needs[:3]):
        return _zero_gradients(head, needs)
    if _is_small(head) or _is_capturing(head.hidden):
        everything = all_rows(head, saved, grads, needs)
        if hidden_done is None and _is_one_block(head, everything, needs):
            return _one_block(head, everything, needs)
        return _sum_blocks(head, everything, needs, hidden_done=hidden_done)
    space = _Space(head.hidden, head.compute_dtype)
    listed = list_rows(head, saved, grads)
    # Where d_hidden is to be handed over early, the rows cannot lie in its memory.
    ahead = _start(head, saved, listed, needs, space) if hidden_done is None else None
    work = listed_rows(head, saved, listed, None if ahead is None else ahead.hidden)
    if work is None:
        del ahead, space
        return _zero_gradients(head, needs)
    return _sum_blocks(head, work, needs, space=space, ahead=ahead, hidden_done=hidden_done)


def _is_small(head: Head) -> bool:
    """Whether finding the rows with a gradient takes longer than computing the others, and the
    budget has room for dx of all rows and their copy."""
    (N, H), V = head.hidden.shape, head.vocab_size
    room = head.chunk_bytes // head.compute_dtype.itemsize
    return N * H * V <= SMALL and N * (H + _aligned(V)) <= room


def _is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured, while which the host can read nothing."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_one_block(head: Head, work: Rows, needs: Needs) -> bool:
    """Whether dx fits the budget as it is, and the gradients its products as they come."""
    dtype = head.compute_dtype
    n, V = work.hidden.shape[0], head.weight.shape[0]
    return (
        work.unscale is None
        and head.vocab_size == V
        and n * _aligned(V) * dtype.itemsize <= head.chunk_bytes
        and head.weight.dtype == gradient_dtype(head.weight, needs) == dtype
        and gradient_dtype(head.hidden, needs) == dtype
    )


def _one_block(head: Head, work: Rows, needs: Needs) -> Gradients:
    """What _sum_blocks comes to where there is nothing to add up."""
    n, V = work.hidden.shape[0], head.weight.shape[0]
    dx = work.hidden.new_empty((n, _aligned(V)))
    if dx.shape[1] != V:
        dx = dx[:, :V]
    dlogits(head, work, head.weight, dx, (0, 0))
    d_bias = None
    if needs.bias and head.bias is not None:
        d_bias = dx.sum(0, dtype=torch.float32).to(gradient_dtype(head.bias, needs))
    return Gradients(
        product(dx, head.weight) if needs.hidden else None,
        product(dx.T, work.hidden) if needs.weight else None,
        d_bias,
    )


def _zero_gradients(head: Head, needs: Needs) -> Gradients:
    leaves = (head.hidden, head.weight, head.bias)
    return Gradients(
        *(
            leaf.new_zeros(leaf.shape, dtype=gradient_dtype(leaf, needs))
            if wanted and leaf is not None
            else None
            for leaf, wanted in zip(leaves, needs[:3], strict=True)
        )
    )


def _start(head: Head, saved: Saved, listed: Listed, needs: Needs, space: _Space) -> _Ahead | None:
    """Launch the first block of however many rows; None where d_hidden's memory can't hold them."""
    N, H = head.hidden.shape
    dtype, d_hidden_dtype = head.compute_dtype, gradient_dtype(head.hidden, needs)
    blocks = _blocks(head, N, needs)
    if not needs.hidden or d_hidden_dtype.itemsize < dtype.itemsize or blocks.rows < N:
        return None
    d_hidden = head.hidden.new_empty((N, H), dtype=d_hidden_dtype)
    hidden = d_hidden.view(-1).view(dtype)[: N * H].view(N, H)
    gather_rows(head.hidden, listed.rows, listed.kept, hidden)
    work = Rows(hidden, saved, listed.grads, listed.rows, kept=listed.kept)
    # Of a weight that is converted, no more than what the budget has room for.
    most = head.vocab_size if head.weight.dtype == dtype else min(blocks.columns, head.vocab_size)
    dlogits(
        head, work, head.weight[:most].to(dtype), space.flat(N * _aligned(blocks.columns)), (0, 0)
    )
    return _Ahead(d_hidden, hidden, most)


def _blocks(
    head: Head, n: int, needs: Needs, first: int = 0, *, hidden_first: bool = False
) -> Plan:
    """The blocks whose temporaries fit chunk_bytes: the larger side is cut by the outer loop.

    first: columns that are computed already. hidden_first: the columns are cut by the outer loop
    whichever is larger.
    """
    tile = tile_for(head.hidden.device, head.compute_dtype)
    H, size = head.hidden.shape[1], head.compute_dtype.itemsize
    converted = H * size if head.weight.dtype != head.compute_dtype else 0
    rows = Side(n, tile.rows, line_bytes=0, sum_bytes=4 * H * needs.hidden)
    left = max(head.vocab_size - first, 1)
    columns = Side(left, tile.columns, converted, sum_bytes=4 * H * needs.weight)
    made = plan(
        rows,
        columns,
        size,
        head.chunk_bytes,
        programs(head.hidden.device),
        columns_outermost=hidden_first or first > 0,
    )
    return made._replace(first=first)


def _sum_blocks(
    head: Head,
    work: Rows,
    needs: Needs,
    *,
    space: _Space | None = None,
    ahead: _Ahead | None = None,
    hidden_done: HiddenDone | None = None,
) -> Gradients:
    """Walk the blocks and add up what each gives. What was computed ahead lies in `space`."""
    space = space or _Space(head.hidden, head.compute_dtype)
    n, first, memory = work.hidden.shape[0], 0, None
    if ahead is not None:
        first = fitting_columns(space.memory.numel(), n, ahead.most_columns, ALIGNED.value)
        memory = ahead.d_hidden
    # A gradient of hidden that is fp32 anyway is the sum that may span all blocks.
    early = hidden_done is not None
    blocks = _blocks(head, n, needs, first, hidden_first=early)
    hidden_dtype = torch.float32 if early else gradient_dtype(head.hidden, needs)
    products = Products(head, work, needs, blocks, hidden_dtype=hidden_dtype, memory=memory)
    d_hidden = None
    for rows, columns in blocks.walk(n, head.vocab_size):
        weight = head.weight[columns].to(head.compute_dtype)
        if columns.stop == first:
            dx = space.block(n, first)
        else:
            dx = space.block(blocks.rows, blocks.columns)
            dx = dx[: rows.stop - rows.start, : columns.stop - columns.start]
            dlogits(head, work, weight, dx, (rows.start, columns.start))
        products.add_to_hidden((rows, columns), dx, weight)
        if hidden_done is not None and rows.stop == n and columns.stop == head.vocab_size:
            d_hidden = products.of_hidden()
            if d_hidden is not None:
                hidden_done(d_hidden)
        products.add_to_weight((rows, columns), dx)
        del dx, weight
    return Gradients(products.of_hidden() if d_hidden is None else d_hidden, *products.of_head())

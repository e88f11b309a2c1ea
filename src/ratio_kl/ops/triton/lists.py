"""Launches of the kernels that pick rows out of a matrix, and put them back."""

import torch
from torch import Tensor

from ...kernels.rows import (
    blank_kernel,
    gather_kernel,
    list_active_kernel,
    list_kept_kernel,
    pick_active_kernel,
    scatter_kernel,
)
from ..contract import Head, Scores
from .call import Arguments, call

LISTED_AT_ONCE = 8192
"""Rows that the one program of a listing looks at in a step."""

PICKED_AT_ONCE = 1024
"""Rows up to which each program of a gather looks at the whole mask instead of at a list. Past it
that would cost more than a launch."""

BLOCK_H = 1024
"""Columns that a program copies in a step."""

Grads = tuple[Tensor | None, Tensor | None]
"""(grad_logps, grad_entropies), contiguous [N] or None."""


def list_active(
    mask: Tensor, ids: Tensor, scores: Scores, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(rows, count) of the active rows.

    Also writes the zeros of the inactive rows into scores, and its count of bad ids.
    """
    N, strides = ids.shape[0], (mask.stride(0), ids.stride(0))
    rows, count = _empty_list(N, ids)
    with_entropy = scores.entropies.numel() > 0

    def arguments() -> Arguments:
        constants = {"WITH_ENTROPY": with_entropy, "BLOCK_N": LISTED_AT_ONCE}
        return Arguments(1, (N, vocab_size, *strides), constants, warps=8)

    sources = (mask.view(torch.int8), ids, rows, count, *scores[:5])
    key = N, vocab_size, strides, ids.dtype, with_entropy, LISTED_AT_ONCE
    call(list_active_kernel, key, sources, arguments)
    return rows, count


def pick_active(
    head: Head, ids: Tensor, mask: Tensor, scores: Scores, out: Tensor
) -> tuple[Tensor, Tensor]:
    """list_active, and out = head.hidden[rows] in out's dtype, for up to PICKED_AT_ONCE rows."""
    N, strides = ids.shape[0], (mask.stride(0), ids.stride(0))
    rows, count = _empty_list(N, ids)
    with_entropy = scores.entropies.numel() > 0

    def arguments() -> Arguments:
        constants = {"WITH_ENTROPY": with_entropy, "BLOCK_N": PICKED_AT_ONCE, "BLOCK_H": BLOCK_H}
        integers = (N, head.vocab_size, out.shape[1], *strides, *head.hidden.stride())
        return Arguments(N, integers, constants)

    sources = (mask.view(torch.int8), ids, head.hidden, rows, count, out, *scores[:5])
    key = head.layout, strides, ids.dtype, with_entropy
    call(pick_active_kernel, key, sources, arguments)
    return rows, count


def _empty_list(N: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the numbers of up to N rows, and for how many they are."""
    return like.new_empty(N, dtype=torch.int32), like.new_empty(1, dtype=torch.int32)


def list_kept(grads: Grads) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, positions, count) of the rows with a gradient that is not zero (NaN is not)."""
    like = next(grad for grad in grads if grad is not None)
    N = like.shape[0]
    rows, count = _empty_list(N, like)
    positions = torch.empty_like(rows)
    call(
        list_kept_kernel,
        (N, LISTED_AT_ONCE),
        (*grads, rows, positions, count),
        lambda: Arguments(1, (N,), {"BLOCK_N": LISTED_AT_ONCE}, warps=8),
    )
    return rows, positions, count


def blank_rows(head: Head, grads: Grads) -> Tensor:
    """hidden in the compute dtype, with 0 in the rows without a gradient."""
    hidden = head.hidden.new_empty(head.hidden.shape, dtype=head.compute_dtype)

    def arguments() -> Arguments:
        N, H = head.hidden.shape
        return Arguments(N, (H, *head.hidden.stride()), {"BLOCK_H": BLOCK_H})

    call(blank_kernel, head.layout, (*grads, head.hidden, hidden), arguments)
    return hidden


def gather_rows(matrix: Tensor, rows: Tensor, count: Tensor, out: Tensor, start: int = 0) -> None:
    """out[i] = matrix[rows[start + i]] while start + i < count (on the device), in out's dtype."""
    (n, H), strides = out.shape, matrix.stride()
    call(
        gather_kernel,
        (n, H, strides, start, matrix.dtype, out.dtype),
        (matrix, rows, count, out),
        lambda: Arguments(n, (start, H, *strides), {"BLOCK_H": BLOCK_H}),
    )


def scatter_rows(matrix: Tensor, positions: Tensor, out: Tensor) -> None:
    """out[n] = matrix[positions[n]], 0 where that is -1, in out's dtype."""
    (N, H), stride = out.shape, matrix.stride(0)
    call(
        scatter_kernel,
        (N, H, stride, matrix.dtype, out.dtype),
        (matrix, positions, out),
        lambda: Arguments(N, (H, stride), {"BLOCK_H": BLOCK_H}),
    )

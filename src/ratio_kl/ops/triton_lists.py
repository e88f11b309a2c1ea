"""Launches of the kernels that pick rows out of a matrix, and put them back."""

import torch
from torch import Tensor

from ..kernels.rows import (
    gather_kernel,
    list_active_kernel,
    list_kept_kernel,
    pick_active_kernel,
    scatter_kernel,
)
from .contract import Head, Scores
from .triton_call import call

LISTED_AT_ONCE = 8192
"""Rows that the one program of a listing looks at in a step."""

PICKED_AT_ONCE = 1024
"""Rows up to which each program of a gather looks at the whole mask instead of at a list. Past it
that would cost more than a launch."""


def list_active(
    mask: Tensor, ids: Tensor, scores: Scores, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(rows, count) of the active rows.

    Also writes the zeros of the inactive rows into scores, and its count of bad ids.
    """
    N = ids.shape[0]
    rows, count = _empty_list(N, ids.device)
    call(
        list_active_kernel,
        1,
        (
            mask.view(torch.int8),
            ids,
            rows,
            count,
            *scores[:5],
        ),
        (
            N,
            vocab_size,
            mask.stride(0),
            ids.stride(0),
        ),
        {"WITH_ENTROPY": scores.entropies.numel() > 0, "BLOCK_N": LISTED_AT_ONCE},
        warps=8,
    )
    return rows, count


def pick_active(
    head: Head, ids: Tensor, mask: Tensor, scores: Scores, out: Tensor
) -> tuple[Tensor, Tensor]:
    """list_active, and out = head.hidden[rows] in out's dtype, for up to PICKED_AT_ONCE rows."""
    N, H = out.shape
    rows, count = _empty_list(N, ids.device)
    call(
        pick_active_kernel,
        N,
        (
            mask.view(torch.int8),
            ids,
            head.hidden,
            rows,
            count,
            out,
            *scores[:5],
        ),
        (
            N,
            head.vocab_size,
            H,
            mask.stride(0),
            ids.stride(0),
            *head.hidden.stride(),
        ),
        {
            "WITH_ENTROPY": scores.entropies.numel() > 0,
            "BLOCK_N": PICKED_AT_ONCE,
            "BLOCK_H": 1024,
        },
    )
    return rows, count


def _empty_list(N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the numbers of up to N rows, and for how many they are."""
    return (
        torch.empty(N, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )


def list_kept(grads: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, positions, count) of the rows with a gradient that is not zero (NaN is not)."""
    like = next(grad for grad in grads if grad is not None)
    N, device = like.shape[0], like.device
    rows, count = _empty_list(N, device)
    positions = torch.empty_like(rows)
    sources = (*grads, rows, positions, count)
    call(list_kept_kernel, 1, sources, (N,), {"BLOCK_N": LISTED_AT_ONCE}, warps=8)
    return rows, positions, count


def gather_rows(matrix: Tensor, rows: Tensor, count: Tensor, out: Tensor, start: int = 0) -> None:
    """out[i] = matrix[rows[start + i]] while start + i < count (on the device), in out's dtype."""
    n, H = out.shape
    integers = (start, H, *matrix.stride())
    call(gather_kernel, n, (matrix, rows, count, out), integers, {"BLOCK_H": 1024})


def scatter_rows(matrix: Tensor, positions: Tensor, out: Tensor) -> None:
    """out[n] = matrix[positions[n]], 0 where that is -1, in out's dtype."""
    N, H = out.shape
    integers = (H, matrix.stride(0))
    call(scatter_kernel, N, (matrix, positions, out), integers, {"BLOCK_H": 1024})

"""Rows picked out of a matrix, and put back: compaction without a host read.

    rows[position]      = n      for the kept rows n in order
    positions[n]        = position of n, -1 where it is left out
    gathered[position]  = matrix[rows[position]]
    scattered[n]        = matrix[positions[n]], 0 where it is left out
    blanked[n]          = matrix[n], 0 where it is left out

One program walks all rows to list them: a few microseconds for each 8192, and no atomics. Where
rows are few, each program of a gather finds its row's position itself, which saves a launch.
"""

import triton
import triton.language as tl

from .primitives import count_bad_ids, has_gradient


@triton.jit
def append_rows(keep, n, count, rows_ptr):
    """Append the kept ones of the rows n to the list; their positions, and the new count."""
    kept = keep.to(tl.int32)
    position = count + tl.cumsum(kept, 0) - 1
    tl.store(rows_ptr + position, n, mask=keep)
    return position, count + tl.sum(kept, 0)


@triton.jit
def copy_row(source_ptr, out_ptr, H, stride, BLOCK_H: tl.constexpr):
    """out[h] = source[h] for h < H, in out's dtype."""
    for h in range(0, H, BLOCK_H):
        k = (h + tl.arange(0, BLOCK_H)).to(tl.int64)
        tile = tl.load(source_ptr + k * stride, mask=k < H)  # [BLOCK_H]
        tl.store(out_ptr + k, tile.to(out_ptr.dtype.element_ty), mask=k < H)


@triton.jit(do_not_specialize=["N"])
def list_active_kernel(
    mask_ptr,
    ids_ptr,
    rows_ptr,
    count_ptr,
    logps_ptr,
    entropies_ptr,
    max_ptr,
    log_sum_ptr,
    bad_ids_ptr,
    N,
    V,
    stride_mn,
    stride_in,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    count = tl.zeros((), tl.int32)
    bad_ids = tl.zeros((), tl.int64)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        active = tl.load(mask_ptr + n.to(tl.int64) * stride_mn, mask=n < N, other=0) != 0
        _, count = append_rows(active, n, count, rows_ptr)
        left_out = (n < N) & (active == 0)
        tl.store(logps_ptr + n, 0.0, mask=left_out)
        tl.store(max_ptr + n, 0.0, mask=left_out)
        tl.store(log_sum_ptr + n, 0.0, mask=left_out)
        if WITH_ENTROPY:
            tl.store(entropies_ptr + n, 0.0, mask=left_out)
        bad_ids += count_bad_ids(ids_ptr + n.to(tl.int64) * stride_in, active, V)
    tl.store(count_ptr, count)
    tl.store(bad_ids_ptr, bad_ids)


@triton.jit(do_not_specialize=["N"])
def pick_active_kernel(
    mask_ptr,
    ids_ptr,
    matrix_ptr,
    rows_ptr,
    count_ptr,
    out_ptr,
    logps_ptr,
    entropies_ptr,
    max_ptr,
    log_sum_ptr,
    bad_ids_ptr,
    N,
    V,
    H,
    stride_mn,
    stride_in,
    stride_xn,
    stride_xh,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """list_active_kernel and gather_kernel in one, for N <= BLOCK_N: a program for each row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    active = tl.load(mask_ptr + n.to(tl.int64) * stride_mn, mask=n < N, other=0) != 0
    if row == 0:
        tl.store(count_ptr, tl.sum(active.to(tl.int32), 0))
        tl.store(bad_ids_ptr, count_bad_ids(ids_ptr + n.to(tl.int64) * stride_in, active, V))
    if tl.load(mask_ptr + row * stride_mn) != 0:
        position = tl.sum((active & (n < row)).to(tl.int64), 0)
        tl.store(rows_ptr + position, row)
        copy_row(matrix_ptr + row * stride_xn, out_ptr + position * H, H, stride_xh, BLOCK_H)
    else:
        tl.store(logps_ptr + row, 0.0)
        tl.store(max_ptr + row, 0.0)
        tl.store(log_sum_ptr + row, 0.0)
        if WITH_ENTROPY:
            tl.store(entropies_ptr + row, 0.0)


@triton.jit(do_not_specialize=["N"])
def list_kept_kernel(
    grad_logps_ptr,
    grad_entropies_ptr,
    rows_ptr,
    positions_ptr,
    count_ptr,
    N,
    BLOCK_N: tl.constexpr,
):
    count = tl.zeros((), tl.int32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keep = has_gradient(n, n < N, grad_logps_ptr, grad_entropies_ptr)
        position, count = append_rows(keep, n, count, rows_ptr)
        tl.store(positions_ptr + n, tl.where(keep, position, -1), mask=n < N)
    tl.store(count_ptr, count)


@triton.jit
def blank_kernel(
    grad_logps_ptr,
    grad_entropies_ptr,
    matrix_ptr,
    out_ptr,
    H,
    stride_xn,
    stride_xh,
    BLOCK_H: tl.constexpr,
):
    """A program for each row."""
    row = tl.program_id(0).to(tl.int64)
    kept = has_gradient(row, row >= 0, grad_logps_ptr, grad_entropies_ptr)
    width = tl.where(kept, H, 0)
    for h in range(0, H, BLOCK_H):
        k = (h + tl.arange(0, BLOCK_H)).to(tl.int64)
        tile = tl.load(matrix_ptr + row * stride_xn + k * stride_xh, mask=k < width, other=0.0)
        tl.store(out_ptr + row * H + k, tile.to(out_ptr.dtype.element_ty), mask=k < H)


@triton.jit(do_not_specialize=["start"])
def gather_kernel(
    matrix_ptr,
    rows_ptr,
    count_ptr,
    out_ptr,
    start,
    H,
    stride_mn,
    stride_mh,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row + start >= tl.load(count_ptr):
        return
    source = matrix_ptr + tl.load(rows_ptr + row + start).to(tl.int64) * stride_mn
    copy_row(source, out_ptr + row * H, H, stride_mh, BLOCK_H)


@triton.jit
def scatter_kernel(matrix_ptr, positions_ptr, out_ptr, H, stride_mn, BLOCK_H: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + n).to(tl.int64)
    width = tl.where(position < 0, 0, H)
    for h in range(0, H, BLOCK_H):
        k = h + tl.arange(0, BLOCK_H)
        tile = tl.load(matrix_ptr + position * stride_mn + k, mask=k < width, other=0.0)
        tl.store(out_ptr + n * H + k, tile.to(out_ptr.dtype.element_ty), mask=k < H)

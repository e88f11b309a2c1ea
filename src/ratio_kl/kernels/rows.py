"""Rows picked out of a matrix, and put back: compaction without a host read.

    rows[position]      = n      for the kept rows n in order
    positions[n]        = position of n, -1 where it is left out
    gathered[position]  = matrix[rows[position]]
    scattered[n]        = matrix[positions[n]], 0 where it is left out

One program walks all rows to list them: a few microseconds for each 8192, and no atomics.
"""

import triton
import triton.language as tl


@triton.jit
def append_rows(keep, n, count, rows_ptr):
    """Append the kept ones of the rows n to the list; their positions, and the new count."""
    kept = keep.to(tl.int32)
    position = count + tl.cumsum(kept, 0) - 1
    tl.store(rows_ptr + position, n, mask=keep)
    return position, count + tl.sum(kept, 0)


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
        active = n < N
        if mask_ptr is not None:
            active = tl.load(mask_ptr + n.to(tl.int64) * stride_mn, mask=n < N, other=0) != 0
            _, count = append_rows(active, n, count, rows_ptr)
            left_out = (n < N) & (active == 0)
            tl.store(logps_ptr + n, 0.0, mask=left_out)
            tl.store(max_ptr + n, 0.0, mask=left_out)
            tl.store(log_sum_ptr + n, 0.0, mask=left_out)
            if WITH_ENTROPY:
                tl.store(entropies_ptr + n, 0.0, mask=left_out)
        ids = tl.load(ids_ptr + n.to(tl.int64) * stride_in, mask=active, other=0)
        bad_ids += tl.sum(((ids < 0) | (ids >= V)).to(tl.int64), 0)
    if mask_ptr is not None:
        tl.store(count_ptr, count)
    tl.store(bad_ids_ptr, bad_ids)


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
        keep = n < 0
        if grad_logps_ptr is not None:
            keep = keep | (tl.load(grad_logps_ptr + n, mask=n < N, other=0.0) != 0)
        if grad_entropies_ptr is not None:
            keep = keep | (tl.load(grad_entropies_ptr + n, mask=n < N, other=0.0) != 0)
        position, count = append_rows(keep, n, count, rows_ptr)
        tl.store(positions_ptr + n, tl.where(keep, position, -1), mask=n < N)
    tl.store(count_ptr, count)


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
    for h in range(0, H, BLOCK_H):
        k = (h + tl.arange(0, BLOCK_H)).to(tl.int64)
        tile = tl.load(source + k * stride_mh, mask=k < H)  # [BLOCK_H]
        tl.store(out_ptr + row * H + k, tile.to(out_ptr.dtype.element_ty), mask=k < H)


@triton.jit
def scatter_kernel(matrix_ptr, positions_ptr, out_ptr, H, stride_mn, BLOCK_H: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + n).to(tl.int64)
    width = tl.where(position < 0, 0, H)
    for h in range(0, H, BLOCK_H):
        k = h + tl.arange(0, BLOCK_H)
        tile = tl.load(matrix_ptr + position * stride_mn + k, mask=k < width, other=0.0)
        tl.store(out_ptr + n * H + k, tile.to(out_ptr.dtype.element_ty), mask=k < H)

"""Pass 1, matrix part: hidden @ weight.T reduced tile by tile, no logits in memory.

For each row n and each tile of BLOCK_V columns, with z the modified logits:

    top    = max z
    mass   = sum exp(z - top)
    moment = sum exp(z - top) (z - top)          only if the entropy is asked for
    square = sum exp(z - top)^2, plain = sum z, best = first column of top
                                                 only if the statistics are asked for

Never stored: logits, probabilities. Stored: these numbers of a row and tile, which
kernels/merge.py puts together. A tile's columns are fixed and nothing is carried from tile to
tile, so a row's numbers are bitwise the same whatever rows it is computed with.
"""

import triton
import triton.language as tl

from .primitives import LOG2E, below, modified_logits, product_tile, tile_origin


@triton.jit(do_not_specialize=["start", "N"])
def score_kernel(
    hidden,
    weight,
    bias_ptr,
    logit_scale_ptr,
    softcap_ptr,
    temperature_ptr,
    rows_ptr,
    count_ptr,
    partials_ptr,
    start,
    N,
    V,
    H,
    stride_hn,
    stride_hh,
    stride_wv,
    stride_wh,
    stride_tn,
    stride_pn,
    stride_pq,
    WITH_ENTROPY: tl.constexpr,
    WITH_STATISTICS: tl.constexpr,
    EVEN_V: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    HIDDEN_TMA: tl.constexpr,
    WEIGHT_TMA: tl.constexpr,
):
    if count_ptr is not None:
        N = tl.minimum((tl.load(count_ptr) - start).to(tl.int32), N)
    row_tiles = tl.cdiv(N, BLOCK_N)
    column_tiles = tl.cdiv(V, BLOCK_V)
    tiles = row_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_origin(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * BLOCK_N
        column = column_tile * BLOCK_V
        x = product_tile(
            hidden, weight, row, column, N, V, H, stride_hn, stride_hh, stride_wv, stride_wh,
            DTYPE, OPERAND, PRECISION, BLOCK_N, BLOCK_V, BLOCK_H, HIDDEN_TMA, WEIGHT_TMA,
        )  # [BLOCK_N, BLOCK_V]  # fmt: skip
        rows = row + tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_V)
        tokens = tl.minimum(rows, N - 1) + start
        if rows_ptr is not None:
            tokens = tl.load(rows_ptr + tokens)
        z = modified_logits(
            x, columns, V, tokens, stride_tn,
            bias_ptr, logit_scale_ptr, softcap_ptr, temperature_ptr,
        )  # fmt: skip
        if WITH_STATISTICS:
            plain = tl.sum(tl.where((columns < V)[None, :], z, 0.0), 1)
        if not EVEN_V:
            z = tl.where((columns < V)[None, :], z, -float("inf"))
        top = tl.max(z, 1)  # [BLOCK_N]
        gap = below(z, top[:, None])
        e = tl.exp2(gap * LOG2E)
        partial = partials_ptr + rows.to(tl.int64) * stride_pn + column_tile
        tl.store(partial, top, mask=rows < N)
        tl.store(partial + stride_pq, tl.sum(e, 1), mask=rows < N)
        if WITH_ENTROPY:
            tl.store(partial + 2 * stride_pq, tl.sum(e * gap, 1), mask=rows < N)
        if WITH_STATISTICS:
            extra = partial + (3 if WITH_ENTROPY else 2) * stride_pq
            best = tl.min(tl.where(z == top[:, None], columns[None, :], V), 1)
            tl.store(extra, tl.sum(e * e, 1), mask=rows < N)
            tl.store(extra + stride_pq, plain, mask=rows < N)
            # A column as fp32: exact up to 2^24, and no vocabulary has more.
            tl.store(extra + 2 * stride_pq, best.to(tl.float32), mask=rows < N)

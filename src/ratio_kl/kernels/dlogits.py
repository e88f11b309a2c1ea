"""Pass 2, matrix part: a block of logits recomputed and turned into its gradient.

For row n with g = dloss/dlogp, h = dloss/dentropy, entropy E, and log p = (z - max) - log_sum:

    dz = g (onehot(id) - p) - h p (log p + E)          p log p = 0 where p = 0
    dx = dz, through temperature, softcap and scale back to hidden @ weight.T + bias

Never stored: logits, probabilities, dz in fp32. Stored: dx of the block, rounded once to the
compute dtype, for the two matrix products of ops/triton/products.py.
"""

import triton
import triton.language as tl

from .primitives import (
    ALIGNED,
    LOG2E,
    has_gradient,
    modified_logits,
    product_gradient,
    product_tile,
    tile_origin,
)


@triton.jit
def store_tile(
    target, tile, row, column, N, V, stride_n,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """tile [BLOCK_N, BLOCK_V] into [N, V]; by descriptor in two halves, for less staging.

    A GPU's descriptor stores 16 bytes at a time: of a row whose V columns end within 16 bytes it
    writes those to their end, where nothing of anybody else's may lie.
    """
    if TMA:
        halves = tl.permute(tl.reshape(tile, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        target.store([row, column], left)
        target.store([row, column + BLOCK_V // 2], right)
    else:
        rows = row + tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_V)
        inside = (rows < N)[:, None] & (columns < V)[None, :]
        tl.store(target + rows.to(tl.int64)[:, None] * stride_n + columns, tile, mask=inside)


@triton.jit
def logits_gradient(
    z, columns, tokens, ids_ptr, max_ptr, log_sum_ptr, entropies_ptr,
    grad_logps_ptr, grad_entropies_ptr,
):  # fmt: skip
    """dz of a tile of logits z [BLOCK_N, BLOCK_V]."""
    below = z - tl.load(max_ptr + tokens)[:, None]
    log_sum = tl.load(log_sum_ptr + tokens)[:, None]
    p = tl.exp2(below * LOG2E - log_sum * LOG2E)
    dz = tl.zeros_like(p)
    if grad_logps_ptr is not None:
        g = tl.load(grad_logps_ptr + tokens)[:, None]
        action = tl.load(ids_ptr + tokens).to(tl.int32)[:, None]
        dz = tl.where(columns[None, :] == action, g, 0.0) - g * p
    if grad_entropies_ptr is not None:
        h = tl.load(grad_entropies_ptr + tokens)[:, None]
        entropy = tl.load(entropies_ptr + tokens)[:, None]
        dz -= tl.where(p == 0, 0.0, h * p * (below - log_sum + entropy))
    return dz


@triton.jit(do_not_specialize=["start", "column_start", "space", "N"])
def dlogits_kernel(
    hidden,
    weight,
    out,
    bias_ptr,
    logit_scale_ptr,
    softcap_ptr,
    temperature_ptr,
    rows_ptr,
    kept_ptr,
    ids_ptr,
    max_ptr,
    log_sum_ptr,
    entropies_ptr,
    grad_logps_ptr,
    grad_entropies_ptr,
    start,
    column_start,
    space,
    N,
    V,
    H,
    stride_hn,
    stride_hh,
    stride_wv,
    stride_wh,
    stride_tn,
    stride_on,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    HIDDEN_TMA: tl.constexpr,
    WEIGHT_TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    HAS_BLANKS: tl.constexpr,
):
    if kept_ptr is not None:
        # The host does not know N yet: as many columns as fit, by blocks.fitting_columns.
        N = tl.load(kept_ptr)
        V = tl.minimum(V, space // tl.maximum(N, 1) // ALIGNED * ALIGNED).to(tl.int32)
        stride_on = tl.cdiv(V, ALIGNED) * ALIGNED
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
        tokens = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1) + start
        if rows_ptr is not None:
            tokens = tl.load(rows_ptr + tokens)
        columns = column_start + column + tl.arange(0, BLOCK_V)
        z = modified_logits(
            x, columns, column_start + V, tokens, stride_tn,
            bias_ptr, logit_scale_ptr, softcap_ptr, temperature_ptr,
        )  # fmt: skip
        dz = logits_gradient(
            z, columns, tokens, ids_ptr, max_ptr, log_sum_ptr, entropies_ptr,
            grad_logps_ptr, grad_entropies_ptr,
        )  # fmt: skip
        dx = product_gradient(
            dz, x, columns, column_start + V, tokens, stride_tn,
            bias_ptr, logit_scale_ptr, softcap_ptr, temperature_ptr,
        )  # fmt: skip
        if HAS_BLANKS:
            # A row without a gradient is 0, whatever its temperature or what was saved of it.
            kept = has_gradient(tokens, tokens >= 0, grad_logps_ptr, grad_entropies_ptr)
            dx = tl.where(kept[:, None], dx, 0.0)
        store_tile(out, dx.to(DTYPE), row, column, N, V, stride_on, BLOCK_N, BLOCK_V, OUT_TMA)

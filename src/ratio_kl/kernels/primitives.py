"""Device functions that the kernels share, and how a matrix is handed to them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import has_descriptors

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for -inf where a difference of logits is formed: exp of it is 0, and 0 times it is 0.
LOWEST = tl.constexpr(-1e4)
# Lines of a block of dx begin at multiples of so many elements.
ALIGNED = tl.constexpr(64)
# Terms of one running sum of fp32 products; a multiple of every tile's depth.
LONGEST_SUM = tl.constexpr(128)

TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def operand_dtype(device: torch.device, dtype: torch.dtype) -> tl.dtype:
    """What a product's operands are handed over in: the interpreter has no bf16 product."""
    return tl.float32 if device.type == "cpu" else TRITON_DTYPES[dtype]


def fits_descriptor(matrix: Tensor) -> bool:
    """Whether the hardware's tensor copy (TMA) can read this matrix where it lies."""
    row, column = matrix.stride()
    return (
        has_descriptors(matrix.device)
        and column == 1
        and row >= matrix.shape[1] > 0
        and row * matrix.itemsize % 16 == 0
        and matrix.data_ptr() % 16 == 0
    )


def descriptor(matrix: Tensor | None, block: list[int]) -> Any:
    """The descriptor by which a kernel reads or writes blocks of a matrix that fits one.

    Made without TensorDescriptor's own checks, which take longer than all else of a launch.
    """
    assert matrix is not None
    made = object.__new__(TensorDescriptor)
    made.base, made.block_shape = matrix, block
    made.shape, made.strides = list(matrix.shape), list(matrix.stride())
    return made


@triton.jit
def count_bad_ids(ids_ptrs, active, V):
    """How many of the active ids lie outside [0, V), int64."""
    ids = tl.load(ids_ptrs, mask=active, other=0)
    return tl.sum(((ids < 0) | (ids >= V)).to(tl.int64), 0)


@triton.jit
def has_gradient(n, inside, grad_logps_ptr, grad_entropies_ptr):
    """Whether row n has a gradient that is not zero (NaN is not); either pointer may be None."""
    kept = n < 0
    if grad_logps_ptr is not None:
        kept = kept | (tl.load(grad_logps_ptr + n, mask=inside, other=0.0) != 0)
    if grad_entropies_ptr is not None:
        kept = kept | (tl.load(grad_entropies_ptr + n, mask=inside, other=0.0) != 0)
    return kept


@triton.jit
def load_tile(
    source,
    row,
    column,
    n_rows,
    n_columns,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """[ROWS, COLUMNS] of a matrix, 0 outside it. Both ways give the same values."""
    if TMA:
        tile = source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        offsets = rows.to(tl.int64)[:, None] * stride_row
        offsets += columns.to(tl.int64)[None, :] * stride_column
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        tile = tl.load(source + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def tile_origin(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column tile of the tile-th piece of work: groups of rows, column after column."""
    first = tile // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return first + within % height, within // height


@triton.jit
def product_step(
    x, hidden, weight, row, column, h, N, V, H, stride_hn, stride_hh, stride_wv, stride_wh,
    DTYPE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, HIDDEN_TMA: tl.constexpr,
    WEIGHT_TMA: tl.constexpr,
):  # fmt: skip
    """x [BLOCK_N, BLOCK_V] plus the product over BLOCK_H of the inner dimension, from h on."""
    a = load_tile(hidden, row, h, N, H, stride_hn, stride_hh, BLOCK_N, BLOCK_H, HIDDEN_TMA)
    b = load_tile(weight, column, h, V, H, stride_wv, stride_wh, BLOCK_V, BLOCK_H, WEIGHT_TMA)
    a, b = a.to(DTYPE).to(OPERAND), b.to(DTYPE).to(OPERAND)
    return tl.dot(a, b.T, x, input_precision=PRECISION)


@triton.jit
def product_tile(
    hidden,
    weight,
    row,
    column,
    N,
    V,
    H,
    stride_hn,
    stride_hh,
    stride_wv,
    stride_wh,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HIDDEN_TMA: tl.constexpr,
    WEIGHT_TMA: tl.constexpr,
):
    """hidden[row:, :] @ weight[column:, :].T, [BLOCK_N, BLOCK_V] in fp32."""
    x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    if tl.float32 == DTYPE:
        # fp32 operands deserve better than one long sum: its error would exceed theirs.
        for start in tl.range(0, H, LONGEST_SUM):
            part = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
            for h in tl.range(start, tl.minimum(start + LONGEST_SUM, H), BLOCK_H):
                part = product_step(
                    part, hidden, weight, row, column, h, N, V, H, stride_hn, stride_hh, stride_wv,
                    stride_wh, DTYPE, OPERAND, PRECISION, BLOCK_N, BLOCK_V, BLOCK_H, HIDDEN_TMA,
                    WEIGHT_TMA,
                )  # fmt: skip
            x += part
    else:
        for h in tl.range(0, H, BLOCK_H):
            x = product_step(
                x, hidden, weight, row, column, h, N, V, H, stride_hn, stride_hh, stride_wv,
                stride_wh, DTYPE, OPERAND, PRECISION, BLOCK_N, BLOCK_V, BLOCK_H, HIDDEN_TMA,
                WEIGHT_TMA,
            )  # fmt: skip
    return x


@triton.jit
def tanh(x):
    """Accurate to a few units in the last place; a polynomial where 1 - 2 / (..) cancels."""
    square = x * x
    tail = square * (2.0 / 15 - square * (17.0 / 315 - square * (62.0 / 2835)))
    near = x - x * square * (1.0 / 3 - tail)
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2 * LOG2E)))
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def scaled_product(x, columns, V, bias_ptr, logit_scale_ptr):
    """(x + bias) * logit_scale of a tile [n, columns]. None means absent."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < V, other=0.0)  # [BLOCK_V]
        x += bias.to(tl.float32)[None, :]
    if logit_scale_ptr is not None:
        x *= tl.load(logit_scale_ptr)
    return x


@triton.jit
def modified_logits(
    x, columns, V, temperatures, stride_tn, bias_ptr, logit_scale_ptr, softcap_ptr, temperature_ptr
):
    """Products of a tile -> logits, in the order bias, scale, softcap, temperature.

    temperatures: row numbers into temperature_ptr, the inverse temperatures.
    """
    x = scaled_product(x, columns, V, bias_ptr, logit_scale_ptr)
    if softcap_ptr is not None:
        softcap = tl.load(softcap_ptr)
        x = softcap * tanh(x / softcap)
    if temperature_ptr is not None:
        x *= tl.load(temperature_ptr + temperatures * stride_tn)[:, None]
    return x


@triton.jit
def product_gradient(
    dz,
    x,
    columns,
    V,
    temperatures,
    stride_tn,
    bias_ptr,
    logit_scale_ptr,
    softcap_ptr,
    temperature_ptr,
):
    """Gradient at the products x, given the gradient dz at their logits: the chain backwards."""
    if temperature_ptr is not None:
        dz *= tl.load(temperature_ptr + temperatures * stride_tn)[:, None]
    if softcap_ptr is not None:
        capped = tanh(
            scaled_product(x, columns, V, bias_ptr, logit_scale_ptr) / tl.load(softcap_ptr)
        )
        dz *= 1.0 - capped * capped
    if logit_scale_ptr is not None:
        dz *= tl.load(logit_scale_ptr)
    return dz


@triton.jit
def below(z, top):
    """z - top, no lower than LOWEST; NaN stays NaN, and -inf below -inf is LOWEST."""
    top = tl.where(top == -float("inf"), 0.0, top)
    return tl.maximum(z - top, LOWEST, propagate_nan=tl.PropagateNan.ALL)

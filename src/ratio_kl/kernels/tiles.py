"""Tile shapes, as data: one row for each architecture and kind of arithmetic.

No row depends on the number of tokens, so that a row's arithmetic does not either.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

INTERPRETER = "interpreter"


class Tile(NamedTuple):
    """How a matrix product is cut up."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int
    """Row tiles that are walked together, column after column, so that they share weight tiles."""


# "half" is bf16 and fp16, "narrowed" the same from fp32 operands (under autocast), "tf32" fp32 on
# tensor cores, "ieee" fp32 by fused multiply-adds.
# Only sm_90 "half" was tuned, on an H200. The rows of "any" keep to the 99 KB of shared memory of
# the smallest cards, and to the 64 KB of AMD's.
TILES = {
    ("sm_90", "half"): Tile(rows=128, columns=256, depth=64, warps=8, stages=4, group=32),
    ("sm_90", "tf32"): Tile(rows=128, columns=128, depth=32, warps=8, stages=3, group=16),
    ("any", "half"): Tile(rows=128, columns=128, depth=32, warps=8, stages=3, group=8),
    ("any", "narrowed"): Tile(rows=128, columns=128, depth=32, warps=8, stages=2, group=8),
    ("any", "tf32"): Tile(rows=128, columns=128, depth=32, warps=8, stages=2, group=8),
    ("any", "ieee"): Tile(rows=64, columns=64, depth=32, warps=4, stages=2, group=8),
    (INTERPRETER, "half"): Tile(rows=64, columns=64, depth=32, warps=1, stages=1, group=2),
    (INTERPRETER, "narrowed"): Tile(rows=64, columns=64, depth=32, warps=1, stages=1, group=2),
    (INTERPRETER, "ieee"): Tile(rows=64, columns=64, depth=32, warps=1, stages=1, group=2),
}


@lru_cache
def architecture(device: torch.device) -> str:
    """The table's name for a device: "sm_90", "hip", or the interpreter on the CPU."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip:
        return "hip"
    return f"sm_{torch.cuda.get_device_capability(device)[0]}0"


@lru_cache
def has_descriptors(device: torch.device) -> bool:
    """Whether the device copies tiles by descriptor (TMA); the interpreter does."""
    if device.type == "cpu":
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def precision(device: torch.device, dtype: torch.dtype) -> str:
    """Arithmetic of fp32 products: "ieee" unless torch's own setting allows TF32."""
    allows_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allows_tf32 and device.type == "cuda" and not torch.version.hip else "ieee"


def tile_for(device: torch.device, dtype: torch.dtype, *operands: torch.dtype) -> Tile:
    """The tile for products of a compute dtype on a device.

    operands: dtypes of the matrices, where they are converted as their tiles are loaded.
    """
    return _tile(device, dtype, operands, precision(device, dtype))


@lru_cache
def _tile(
    device: torch.device, dtype: torch.dtype, operands: tuple[torch.dtype, ...], rounding: str
) -> Tile:
    kind = "half" if dtype.itemsize == 2 else rounding
    if kind == "half" and any(operand.itemsize > 2 for operand in operands):
        kind = "narrowed"
    return TILES.get((architecture(device), kind)) or TILES["any", kind]


@lru_cache
def programs(device: torch.device) -> int:
    """Programs of a persistent kernel: one a multiprocessor."""
    if device.type == "cpu":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""Compiles both matrix kernels for GPUs that are not here; prints the shared memory of each.

    python -m kernels.compiled cuda 86 32

Run in a process whose environment has no TRITON_INTERPRET. One line a kernel and arithmetic:
kernel, arithmetic, bytes.
"""

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ratio_kl.kernels.dlogits import dlogits_kernel
from ratio_kl.kernels.score import score_kernel
from ratio_kl.kernels.tiles import TILES, Tile

ARITHMETIC = {
    # operands in memory, compute dtype, precision of tl.dot
    "half": ("bf16", tl.bfloat16, "ieee"),
    "narrowed": ("fp32", tl.bfloat16, "ieee"),
    "tf32": ("fp32", tl.float32, "tf32"),
    "ieee": ("fp32", tl.float32, "ieee"),
}
ABSENT = ("bias_ptr", "logit_scale_ptr", "softcap_ptr", "rows_ptr", "count_ptr", "kept_ptr")


def arguments(tile: Tile, kind: str, descriptors: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the arguments that are not fp32 pointers or int32, and the values of constants."""
    memory, dtype, precision = ARITHMETIC[kind]
    constants = {
        "WITH_ENTROPY": True, "WITH_STATISTICS": True, "EVEN_V": False, "HAS_BLANKS": True,
        "DTYPE": dtype, "OPERAND": dtype, "PRECISION": precision, "GROUP": tile.group,
        "BLOCK_N": tile.rows, "BLOCK_V": tile.columns, "BLOCK_H": tile.depth,
        "HIDDEN_TMA": descriptors, "WEIGHT_TMA": descriptors, "OUT_TMA": descriptors,
        "stride_hh": 1, "stride_wh": 1,
    } | dict.fromkeys(ABSENT)  # fmt: skip
    made = "bf16" if dtype == tl.bfloat16 else "fp32"
    types = {"ids_ptr": "*i64", "hidden": "*" + memory, "weight": "*" + memory, "out": "*" + made}
    if descriptors:
        types |= {
            "hidden": f"tensordesc<{memory}[{tile.rows}, {tile.depth}]>",
            "weight": f"tensordesc<{memory}[{tile.columns}, {tile.depth}]>",
            "out": f"tensordesc<{made}[{tile.rows}, {tile.columns // 2}]>",
        }
    return types, constants


def shared_memory(kernel: Any, target: GPUTarget, kind: str) -> int:
    """Bytes of shared memory of the kernel with the tile of "any" GPU, sizes and rows aligned."""
    tile, names = TILES["any", kind], kernel.arg_names
    descriptors = target.backend == "cuda" and int(target.arch) >= 90
    types, values = arguments(tile, kind, descriptors)
    constants = {name: value for name, value in values.items() if name in names}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name) or ("*fp32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    aligned = ("H", "V", "stride_hn", "stride_wv", "stride_on")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name][0] == "*" or name in aligned
        },
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=target, options=options).metadata.shared


if __name__ == "__main__":
    backend, arch, warp = sys.argv[1:]
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, int(warp))
    for kind in ARITHMETIC:
        if (backend, kind) == ("hip", "tf32"):
            continue  # kernels/tiles.py never asks for it there
        for kernel in (score_kernel, dlogits_kernel):
            size = shared_memory(kernel, target, kind)
            sys.stdout.write(f"{kernel.fn.__name__} {kind} {size}\n")

"""Calls of Triton kernels without Triton's own look-up, which costs more than a small launch.

`kernel[grid](...)` binds and inspects every argument on each call, about a microsecond each. What
it finds depends on little: dtypes, alignment, and whether an integer is 1 or a multiple of 16. So
the compiled kernel is kept under just that, and later calls go straight to it.
"""

from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
_flags: dict[Any, tuple[bool, ...]] = {}


def call(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """kernel[(programs,)](*arguments, **constants), on the current device and stream.

    arguments: all but the kernel's constexprs, in the order of its signature: tensors, tensor
        descriptors, integers or None. constants: its constexprs, in the same order.
    """
    if not isinstance(kernel, triton.JITFunction):
        # The interpreter, on the CPU.
        kernel[(programs,)](*arguments, **constants)
        return
    key: list[Any] = [kernel.fn, torch.cuda.current_device(), warps, stages]
    for argument, specialised in zip(arguments, _specialised(kernel.fn, kernel), strict=True):
        if argument is None:
            key.append(None)
        elif isinstance(argument, int):
            key.append(-(2**31) <= argument < 2**31)
            if specialised:
                key.append((argument == 1, argument % 16 == 0))
        elif isinstance(argument, Tensor):
            key += (argument.dtype, argument.data_ptr() % 16 == 0)
        else:
            key += (argument.base.dtype, *argument.block_shape)
    key += constants.values()
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        _compiled[tuple(key)] = kernel[(programs,)](
            *arguments, **constants, num_warps=warps, num_stages=stages
        )
    else:
        compiled[(programs, 1, 1)](*arguments, *constants.values())


def _specialised(function: Any, kernel: Any) -> tuple[bool, ...]:
    """Whether Triton compiles anew for some values of each argument that is no constexpr."""
    flags = _flags.get(function)
    if flags is None:
        parameters = (p for p in kernel.params if not p.is_constexpr)
        flags = _flags[function] = tuple(not p.do_not_specialize for p in parameters)
    return flags

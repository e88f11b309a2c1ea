"""Calls of Triton kernels without Triton's own look-up, which costs more than a small launch.

`kernel[grid](...)` binds and inspects every argument on each call, about a microsecond each. What
it finds depends on little: dtypes, alignment, and whether an integer is 1 or a multiple of 16. So
the compiled kernel is kept under just that, and later calls go straight to it.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


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
    key = (
        kernel.fn,
        torch.cuda.current_device(),
        warps,
        stages,
        *map(_seen_by_compiler, arguments, _specialised(kernel)),
        *constants.values(),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](
            *arguments, **constants, num_warps=warps, num_stages=stages
        )
    else:
        compiled[(programs, 1, 1)](*arguments, *constants.values())


@lru_cache
def _specialised(kernel: Any) -> tuple[bool, ...]:
    """Whether Triton compiles anew for some values of each argument."""
    return tuple(not parameter.do_not_specialize for parameter in kernel.params)


def _seen_by_compiler(argument: Any, specialised: bool) -> Any:
    """What Triton's compiler knows of an argument's value."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        wide = not -(2**31) <= argument < 2**31
        return (wide, argument == 1, argument % 16 == 0) if specialised else wide
    return argument.base.dtype, tuple(argument.block_shape)

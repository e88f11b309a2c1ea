"""Calls of Triton kernels without Triton's own look-up, which costs more than a small launch.

`kernel[grid](...)` binds and inspects every argument on each call, about a microsecond each. What
it finds depends on little: dtypes, alignment, and whether an integer is 1 or a multiple of 16. So
the compiled kernel is kept under just that, and later calls go straight to its launcher, which
takes addresses as numbers: of a tensor it would ask the driver where it lies.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

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
    device = torch.cuda.current_device()
    key: list[Any] = [kernel.fn, device, warps, stages]
    given: list[Any] = []
    for argument, specialised in zip(arguments, _specialised(kernel.fn, kernel), strict=False):
        if argument is None:
            key.append(None)
        elif type(argument) is int:
            # One number for all that Triton looks at: 0 to 3, and 4 more past 32 bits.
            kind = 0 if -(2**31) <= argument < 2**31 else 4
            if specialised:
                kind += 2 if argument == 1 else argument % 16 == 0
            key.append(kind)
        elif isinstance(argument, Tensor):
            key.append(argument.dtype)
            argument = argument.data_ptr()
            key.append(argument % 16 == 0)
        else:
            key += (argument.base.dtype, *argument.block_shape)
        given.append(argument)
    key += constants.values()
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        _compiled[tuple(key)] = kernel[(programs,)](
            *arguments, **constants, num_warps=warps, num_stages=stages
        )
    elif _is_watched():
        compiled[(programs, 1, 1)](*arguments, *constants.values())
    else:
        stream = driver.active.get_current_stream(device)
        about = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(programs, 1, 1, stream, *about, *given, *constants.values())


def _is_watched() -> bool:
    """Whether a profiler wants to be told of launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # A chain of hooks, or in older releases one hook or None.
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def _specialised(function: Any, kernel: Any) -> tuple[bool, ...]:
    """Whether Triton compiles anew for some values of each argument that is no constexpr."""
    flags = _flags.get(function)
    if flags is None:
        parameters = (p for p in kernel.params if not p.is_constexpr)
        flags = _flags[function] = tuple(not p.do_not_specialize for p in parameters)
    return flags

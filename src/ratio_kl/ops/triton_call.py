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
    given = list(arguments)
    for place, specialised in enumerate(_specialised(kernel.fn, kernel)):
        argument = given[place]
        if argument is None:
            key.append(None)
        elif type(argument) is int:
            key.append(-(2**31) <= argument < 2**31)
            if specialised:
                key.append((argument == 1, argument % 16 == 0))
        elif isinstance(argument, Tensor):
            given[place] = address = argument.data_ptr()
            key += (argument.dtype, address % 16 == 0)
        else:
            key += (argument.base.dtype, *argument.block_shape)
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

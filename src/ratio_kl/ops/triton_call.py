"""Calls of Triton kernels without Triton's own look-up, which costs more than a small launch.

`kernel[grid](...)` binds and inspects every argument on each call, about a microsecond each. What
it finds depends on little: dtypes, alignment, and whether an integer is 1 or a multiple of 16. So
the compiled kernel is kept under just that, and later calls go straight to its launcher, which
takes addresses as numbers: of a tensor it would ask the driver where it lies.
"""

from functools import lru_cache
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
    sources: tuple[Any, ...],
    integers: tuple[int, ...],
    constants: dict[str, Any],
    *,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """kernel[(programs,)](*sources, *integers, **constants), on the current device and stream.

    sources: tensors, tensor descriptors or None. constants: the kernel's constexprs, in the order
        of its signature.
    """
    if not isinstance(kernel, triton.JITFunction):
        # The interpreter, on the CPU.
        kernel[(programs,)](*sources, *integers, **constants)
        return
    device = torch.cuda.current_device()
    key: list[Any] = [kernel.fn, device, warps, stages]
    given: list[Any] = []
    for source in sources:
        if source is None:
            key.append(None)
        elif isinstance(source, Tensor):
            key.append(source.dtype)
            if torch.version.hip:
                # Triton takes shorter offsets there into memory of less than 2 GB.
                key.append(source.untyped_storage().nbytes() < 2**31)
            source = source.data_ptr()
            key.append(source % 16 == 0)
        else:
            key += (source.base.dtype, *source.block_shape)
        given.append(source)
    key += _kinds(_specialised(kernel.fn, kernel)[len(sources) :], integers)
    key += constants.values()
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        _compiled[tuple(key)] = kernel[(programs,)](
            *sources, *integers, **constants, num_warps=warps, num_stages=stages
        )
    elif _is_watched():
        compiled[(programs, 1, 1)](*sources, *integers, *constants.values())
    else:
        stream = driver.active.get_current_stream(device)
        about = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(programs, 1, 1, stream, *about, *given, *integers, *constants.values())


@lru_cache(maxsize=4096)
def _kinds(specialised: tuple[bool, ...], integers: tuple[int, ...]) -> tuple[int, ...]:
    """What Triton looks at of each: 32 bits or 64, and if specialised, whether 1, or 16 n."""
    kinds = []
    for looks, number in zip(specialised, integers, strict=True):
        divisibility = (2 if number == 1 else number % 16 == 0) if looks else 0
        kinds.append(4 * (not -(2**31) <= number < 2**31) + divisibility)
    return tuple(kinds)


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

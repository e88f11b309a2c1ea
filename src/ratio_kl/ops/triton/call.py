"""Calls of Triton kernels without Triton's own look-up, which costs more than a small launch.

`kernel[grid](...)` binds and inspects every argument on each call, about a microsecond each. What
it finds is kept twice here:

- the whole call, under a key that, as the caller promises, decides all but where the tensors lie.
  A later call with that key, and tensors aligned alike, looks at nothing else;
- the compiled kernel, under what Triton's compiler looks at: dtypes, alignment, and whether an
  integer is 1 or a multiple of 16. A call for another number of rows finds that.

Both then go straight to Triton's launcher, and hand it addresses: of a tensor it would ask the
driver where it lies.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from ...kernels.primitives import descriptor

REMEMBERED = 4096
"""Whole calls that are kept at most: lengths vary."""

Sources = tuple[Tensor | None, ...]

_calls: dict[tuple[Any, ...], "_Call"] = {}
_compiled: dict[tuple[Any, ...], Any] = {}
_flags: dict[Any, tuple[bool, ...]] = {}


class Arguments(NamedTuple):
    """What a kernel is called with beside its tensors."""

    programs: int
    integers: tuple[int, ...]
    constants: dict[str, Any]
    """The kernel's constexprs, in the order of its signature."""
    blocks: tuple[list[int] | None, ...] = ()
    """For the first sources: the shape of the blocks, where a tensor is passed as a descriptor."""
    warps: int = 4
    stages: int = 3


class _Call(NamedTuple):
    """A compiled kernel with its arguments, but for where its tensors lie."""

    compiled: Any
    programs: int
    blocks: tuple[list[int] | None, ...]
    rest: tuple[Any, ...]
    """Integers and constants."""


def call(kernel: Any, key: Hashable, sources: Sources, arguments: Callable[[], Arguments]) -> None:
    """kernel[(programs,)](*sources, *integers, **constants), on the current device and stream.

    key: decides what `arguments()` are, and the sources' dtypes.
    """
    if not isinstance(kernel, triton.JITFunction):
        interpret(kernel, key, sources, arguments())
        return
    device = torch.cuda.current_device()
    given = [None if source is None else source.data_ptr() for source in sources]
    # None stays None, and 0 (an empty tensor's) 0.
    known = (kernel.fn, device, key, *[address and address % 16 for address in given])
    if torch.version.hip:
        known += tuple(_is_short(source) for source in sources)
    found = _calls.get(known)
    if found is None:
        if len(_calls) >= REMEMBERED:
            _calls.clear()
        found, was_launched = _look_up(kernel, device, sources, arguments())
        _calls[known] = found
        if was_launched:
            return
    compiled, programs, blocks, rest = found
    if _is_watched():
        compiled[(programs, 1, 1)](*_passed(sources, sources, blocks), *rest)
        return
    passed = _passed(sources, given, blocks)
    stream = driver.active.get_current_stream(device)
    about = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(programs, 1, 1, stream, *about, *passed, *rest)


def interpret(kernel: Any, key: Hashable, sources: Sources, arguments: Arguments) -> None:
    """The same on the CPU, where Triton plays the kernel; nothing is looked up by the key."""
    passed = _passed(sources, sources, arguments.blocks)
    kernel[(arguments.programs,)](*passed, *arguments.integers, **arguments.constants)


def _passed(
    sources: Sources, given: Sequence[Any], blocks: tuple[list[int] | None, ...]
) -> Sequence[Any]:
    """`given`, with descriptors in the place of those sources that have blocks."""
    if not blocks:
        return given
    passed = list(given)
    for position, block in enumerate(blocks):
        if block is not None:
            passed[position] = descriptor(sources[position], block)
    return passed


def _look_up(
    kernel: Any, device: int, sources: Sources, arguments: Arguments
) -> tuple[_Call, bool]:
    """The call, and whether it has been launched already, because it had to be compiled."""
    programs, integers, constants, blocks, warps, stages = arguments
    key: list[Any] = [kernel.fn, device, warps, stages, *constants.values()]
    for position, source in enumerate(sources):
        block = blocks[position] if position < len(blocks) else None
        key += () if block is None else block
        key += (None,) if source is None else (source.dtype, source.data_ptr() % 16 == 0)
        if torch.version.hip:
            key.append(_is_short(source))
    key += _kinds(_specialised(kernel.fn, kernel)[len(sources) :], integers)
    compiled = _compiled.get(tuple(key))
    is_new = compiled is None
    if is_new:
        options = {"num_warps": warps, "num_stages": stages}
        passed = _passed(sources, sources, blocks)
        compiled = kernel[(programs,)](*passed, *integers, **constants, **options)
        _compiled[tuple(key)] = compiled
    return _Call(compiled, programs, blocks, (*integers, *constants.values())), is_new


def _is_short(source: Tensor | None) -> bool:
    """Of less than 2 GB, for which Triton's kernels for AMD GPUs take shorter offsets."""
    return source is not None and source.untyped_storage().nbytes() < 2**31


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

"""When a launch takes a compiled kernel again, and what it hands to it.

Triton's compiler and launcher are played here: the first call of a kind compiles, later ones of the
same kind must find what it made, and no call may find what was made for another kind.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from ratio_kl.ops.triton import call as triton_call


class Compiled:
    """What Triton makes of a kernel: it remembers its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.watched: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.watched.append((grid, *arguments))


class Kernel:
    """A jitted function of (x, n, count, FLAG), with count not specialised."""

    def __init__(self) -> None:
        self.fn = object()
        self.compiled: list[Compiled] = []
        names = {"x": False, "n": False, "count": True}
        self.params = [
            SimpleNamespace(is_constexpr=False, do_not_specialize=plain) for plain in names.values()
        ]
        self.params.append(SimpleNamespace(is_constexpr=True, do_not_specialize=False))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(triton_call, "driver", stream)
    monkeypatch.setattr(triton_call.triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(triton_call, "knobs", SimpleNamespace(runtime=hooks))
    return Kernel()


def launch(
    kernel: Kernel, x: Any, n: int = 5, count: int = 3, flag: bool = True, **options
) -> None:
    blocks = ()
    if isinstance(x, Blocks):
        x, blocks = x.matrix, (x.shape,)
    key = (
        n,
        count,
        flag,
        blocks and tuple(blocks[0]),
        *options.values(),
        x if x is None else x.dtype,
    )
    triton_call.call(
        kernel,
        key,
        (x,),
        lambda: triton_call.Arguments(2, (n, count), {"FLAG": flag}, blocks, **options),
    )


def matrix(dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    """Its address is a multiple of 16 for an offset of 0, not for one of 1."""
    storage = torch.zeros(64, dtype=dtype)
    start = -storage.data_ptr() % 16 // storage.itemsize
    return storage[start + offset :]


class Blocks(NamedTuple):
    """A matrix that is passed as a descriptor of blocks of this shape."""

    matrix: torch.Tensor
    shape: list[int]


def blocks(rows: int) -> Blocks:
    return Blocks(matrix().view(8, 8), [rows, 8])


SAME = [
    lambda k: launch(k, matrix()),
    lambda k: launch(k, matrix(), n=7),  # neither 1 nor a multiple of 16, as 5
    lambda k: launch(k, matrix(), count=1),  # not specialised
    lambda k: launch(k, matrix(), count=32),
]
OTHER = [
    lambda k: launch(k, matrix(torch.bfloat16)),
    lambda k: launch(k, matrix(offset=1)),
    lambda k: launch(k, None),
    lambda k: launch(k, blocks(4)),
    lambda k: launch(k, blocks(8)),
    lambda k: launch(k, matrix(), n=1),
    lambda k: launch(k, matrix(), n=32),
    lambda k: launch(k, matrix(), n=2**31 + 1),
    lambda k: launch(k, matrix(), count=2**31),
    lambda k: launch(k, matrix(), flag=False),
    lambda k: launch(k, matrix(), warps=8),
    lambda k: launch(k, matrix(), stages=4),
]


def test_each_kind_of_call_is_compiled_once(kernel: Kernel) -> None:
    for call in SAME:
        call(kernel)
    assert len(kernel.compiled) == 1
    assert len(kernel.compiled[0].launches) == len(SAME) - 1
    for call in OTHER * 2:
        call(kernel)
    assert len(kernel.compiled) == 1 + len(OTHER)
    assert all(len(each.launches) == 1 for each in kernel.compiled[1:])


def test_another_device_has_kernels_of_its_own(kernel: Kernel, monkeypatch) -> None:
    launch(kernel, matrix())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, matrix())
    assert len(kernel.compiled) == 2


def test_the_launcher_is_given_addresses(kernel: Kernel) -> None:
    x = matrix()
    for _ in range(2):
        launch(kernel, x)
    grid_and_stream, about = (2, 1, 1, 7), ("function", "metadata", None, None, None)
    expected = (*grid_and_stream, *about, x.data_ptr(), 5, 3, True)
    assert kernel.compiled[0].launches == [expected]


def test_amd_gpus_have_kernels_of_their_own_for_large_memory(kernel: Kernel, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    small = matrix(torch.uint8)
    for start in (0, 0, 16):
        launch(kernel, small[start:])
    assert len(kernel.compiled) == 1
    large = torch.empty(2**31, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    launch(kernel, large)
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize(
    "hook", [lambda metadata: None, SimpleNamespace(calls=[print])], ids=["a hook", "a chain"]
)
def test_a_profiler_sees_the_launches(kernel: Kernel, hook: Any) -> None:
    x = matrix()
    launch(kernel, x)
    triton_call.knobs.runtime.launch_enter_hook = hook
    launch(kernel, x)
    ((grid, *arguments),) = kernel.compiled[0].watched
    assert grid == (2, 1, 1)
    assert arguments[0] is x
    assert arguments[1:] == [5, 3, True]
    assert not kernel.compiled[0].launches

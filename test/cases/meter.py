"""What a call on the torch backend costs: bytes that are alive at once, buffers, products, passes.

A dispatch mode does not look into a custom operator, so the backend's two functions are made to
enter it again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ratio_kl.ops.torch import linear as torch_backend

PRODUCTS = ("mm", "addmm", "addmm_")


class Meter(TorchDispatchMode):
    """Counts while it is active; storages that came in from outside do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Most bytes alive at once, of those allocated under the meter."""
        self.shapes: list[tuple[int, ...]] = []
        """Shape of every tensor that was allocated."""
        self.multiplications = 0
        """Sum over all matrix products of rows * inner * columns."""
        self.passes: list[str] = []
        """"forward" and "backward" in the order in which the backend was called."""
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, *kwargs.values())):
            self._meet(tensor, counted=False)
        if func.overloadpacket.__name__ in PRODUCTS:
            left, right = [x for x in args if isinstance(x, Tensor)][-2:]
            self.multiplications += left.shape[0] * left.shape[1] * right.shape[1]
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._meet(tensor, counted=True)
        return result

    def _forget_the_dead(self) -> None:
        dead = [key for key, (storage, _) in self._known.items() if storage.expired()]
        for key in dead:
            del self._known[key]

    def _meet(self, tensor: Tensor, *, counted: bool) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata in self._known:
            return
        size = tensor.untyped_storage().nbytes() if counted else 0
        self._known[storage.cdata] = (storage, size)
        if counted:
            self.shapes.append(tuple(tensor.shape))
            self._forget_the_dead()
            self.peak = max(self.peak, sum(size for _, size in self._known.values()))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


@contextmanager
def metered() -> Iterator[Meter]:
    """Meter everything inside the block, both passes of the torch backend included."""
    meter = Meter()

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(torch_backend, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            meter.passes.append(name)
            with meter:
                return original(*args, **kwargs)

        return call

    patches = [
        mock.patch.object(torch_backend, name, watched(name)) for name in ("forward", "backward")
    ]
    with patches[0], patches[1], meter:
        yield meter

"""Settings that hold for every test, and must hold before Triton is imported."""

import os
import sys
import zlib
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# Tests run side by side: more threads each would only take turns.
torch.set_num_threads(1)

ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """An environment without pytest-timeout must still accept the option in pyproject.toml."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; pytest-timeout is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if not HAS_GPU:
        reasons["gpu"] = "needs a CUDA GPU, and torch sees none here"
    else:
        reasons["interpreter"] = "needs a machine without a GPU: here kernels run on that"
    if find_spec("triton") is None:
        reasons["interpreter"] = "needs the package triton"
    for item in items:
        for marker in reasons.keys() & item.keywords:
            item.add_marker(pytest.mark.skip(reason=reasons[marker]))


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same inputs for a test whichever tests ran before it, other inputs for another test."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN (the largest number, for integers), not luck."""
    for owner, name in ALLOCATORS:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling():
            return tensor
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)
        elif tensor.dtype != torch.bool and not tensor.is_complex():
            tensor.detach().fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    # torch.compile traces through a call of it, and leaves it alone where the call itself was not
    # compiled: by then torch.empty may be unknown to it.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.decorators.skip(poisoned)
    return poisoned


@pytest.fixture(autouse=True)
def keys_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a kernel that was called with a key is called again as it was then; here each call
    of a test is compared with the first one of its key."""
    module = sys.modules.get("ratio_kl.ops.triton.call")
    if module is None or HAS_GPU:
        return
    calls: dict[Any, Any] = {}
    interpret = module.interpret

    def compared(kernel: Any, key: Any, sources: Any, arguments: Any) -> None:
        known = (kernel.fn, key, *[s if s is None else s.data_ptr() % 16 for s in sources])
        decided = arguments, [s if s is None else s.dtype for s in sources]
        assert calls.setdefault(known, decided) == decided, f"{key} decides too little"
        interpret(kernel, key, sources, arguments)

    monkeypatch.setattr(module, "interpret", compared)

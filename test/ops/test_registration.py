"""Operators are called directly where nothing of torch is in between, and alike either way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ratio_kl import linear_logprob, ratio_kl
from ratio_kl.ops import registration
from ratio_kl.ops.operators import linear_scores_op

# The smallest sizes that are cut into several tiles both ways (tiles are at least 64 x 64).
N, H, V = 70, 5, 131
OPERATORS = {"ratio_kl::linear_scores", "ratio_kl::linear_logprob_backward"}


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(N, H).requires_grad_(), torch.randn(V, H).requires_grad_()


def both_passes(hidden: Tensor, weight: Tensor) -> list[Tensor]:
    ids, mask = torch.arange(N) % V, torch.arange(N) % 3 > 0
    out = linear_logprob(hidden, weight, ids, mask, temperature=0.7, return_entropy=True)
    gradients = torch.autograd.grad(out.logps.sum() + out.entropies.sum(), (hidden, weight))
    return [out.logps.detach(), out.entropies.detach(), *gradients]


class Seen(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many calls of pass 1 went through torch's dispatcher."""
    calls = []
    overload = linear_scores_op.overload

    class Counted:
        def __call__(self, *args):
            calls.append(args)
            return overload(*args)

        def __getattr__(self, name):
            return getattr(overload, name)

    monkeypatch.setattr(linear_scores_op, "overload", Counted())
    return lambda: len(calls)


def test_a_plain_call_is_direct(dispatched) -> None:
    both_passes(*leaves())
    with torch.no_grad():
        linear_logprob(*leaves(), torch.zeros(N, dtype=torch.int64))
    assert dispatched() == 0


def test_both_ways_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    given = leaves()
    direct = both_passes(*given)
    monkeypatch.setattr(registration, "_is_plain", lambda args: False)
    for a, b in zip(direct, both_passes(*given), strict=True):
        assert torch.equal(a, b)


def test_a_dispatch_mode_sees_both_operators() -> None:
    given = leaves()
    direct = both_passes(*given)
    with Seen() as seen:
        results = both_passes(*given)
    assert seen.names >= OPERATORS
    for a, b in zip(direct, results, strict=True):
        assert torch.equal(a, b)


def test_a_profiler_sees_both_operators() -> None:
    with torch.autograd.profiler.profile() as profile:
        both_passes(*leaves())
    assert {event.name for event in profile.function_events} >= OPERATORS


class Marked(Tensor):
    """A subclass that someone else may have plans with."""


@contextmanager
def functorch() -> Iterator[None]:
    from torch._functorch.eager_transforms import grad_increment_nesting

    with grad_increment_nesting():
        yield


@pytest.mark.parametrize(
    "listener",
    [lambda: FakeTensorMode(allow_non_fake_inputs=True), BaseTorchFunctionMode, functorch],
)
def test_other_listeners_go_through_the_dispatcher(listener, dispatched) -> None:
    hidden, weight = (leaf.detach() for leaf in leaves())
    ids = torch.zeros(N, dtype=torch.int64)
    with torch.no_grad(), listener():
        assert linear_logprob(hidden, weight, ids, backend="torch").logps.shape == (N,)
    assert dispatched()


def test_other_tensors_go_through_the_dispatcher(dispatched) -> None:
    hidden, weight = (leaf.detach() for leaf in leaves())
    ids = torch.zeros(N, dtype=torch.int64)
    marked = hidden.as_subclass(Marked)
    linear_scores_op(marked, weight, None, ids, None, None, None, None, V, torch.float32,
                     False, False, "torch", 1, "later")  # fmt: skip
    assert (so_far := dispatched())
    meta = [x.to("meta") for x in (hidden, weight, ids)]
    logps, *_ = linear_scores_op(*meta[:2], None, meta[2], None, None, None, None, V,
                                 torch.float32, False, False, "torch", 1, "later")  # fmt: skip
    assert logps.device.type == "meta"
    assert dispatched() > so_far


def test_tracing_goes_through_the_dispatcher(dispatched) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    hidden, weight = (leaf.detach() for leaf in leaves())
    ids = torch.zeros(N, dtype=torch.int64)
    graph = make_fx(lambda h, w: linear_logprob(h, w, ids, backend="torch").logps)(hidden, weight)
    assert "ratio_kl.linear_scores.default" in str(graph.code)
    assert dispatched()


def test_a_trace_above_the_dispatcher_has_both_operators() -> None:
    """Such a mode is on no stack of modes while backward runs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    ids = torch.zeros(N, dtype=torch.int64)

    def gradient(hidden: Tensor, weight: Tensor) -> Tensor:
        weight = weight.detach().requires_grad_()
        loss = linear_logprob(hidden, weight, ids, backend="torch").logps.sum()
        return torch.autograd.grad(loss, weight)[0]

    hidden, weight = (leaf.detach() for leaf in leaves())
    graph = make_fx(gradient, pre_dispatch=True)(hidden, weight)
    for name in OPERATORS:
        assert f"{name.replace('::', '.')}.default" in str(graph.code)
    assert torch.equal(graph(2 * hidden, weight), gradient(2 * hidden, weight))


def test_inference_mode_builds_no_graph_whatever_the_grad_mode() -> None:
    hidden, weight = leaves()
    ids = torch.zeros(N, dtype=torch.int64)
    expected = linear_logprob(hidden, weight, ids).logps
    with torch.inference_mode(), torch.enable_grad():
        logps = linear_logprob(hidden, weight, ids).logps
    assert logps.is_inference()
    assert not logps.requires_grad
    assert torch.equal(logps, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_many_gradients_at_once() -> None:
    """torch hands them over as one batch, which only its dispatcher can take apart."""
    logits = torch.randn(3, V, requires_grad=True)
    ids, mask, old = torch.arange(3), torch.tensor([True, False, True]), torch.zeros(3)
    ratio, _ = ratio_kl(logits, torch.randn(3, V), ids, mask, old)
    each = torch.eye(3)
    batch = torch.autograd.grad(ratio, logits, each, is_grads_batched=True, retain_graph=True)[0]
    for one, gradient in zip(each, batch, strict=True):
        assert torch.equal(gradient, torch.autograd.grad(ratio, logits, one, retain_graph=True)[0])

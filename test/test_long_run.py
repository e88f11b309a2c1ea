"""Thousands of optimizer steps on batches of changing lengths, beside the same on full logits.

Memory must not grow, nothing may compile anew after the first steps, and the loss must follow that
of full logits as closely as another order of summation does.
"""

import gc
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ratio_kl import FusedLinearRatioKLLoss
from ratio_kl.config import RatioKLConfig
from ratio_kl.reference import reference_loss

# torch looks at it while it compiles a function of a hidden state that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

V, H = 97, 16
"""Two column tiles. The model is a table of states and a head: its step costs less than ours."""
CONFIG = RatioKLConfig(loss_type="cispo", epsilon_high=5.0, beta=0.02, entropy_coef=0.003)
# No entropy mask: at its threshold one rounding decides about a whole token, in any two runs.


class Policy(nn.Module):
    """The hidden state of a token is that of its id; the head is apart."""

    def __init__(self, loss_fn: Callable[..., Any], device: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.states = nn.Parameter(torch.randn(V, H, generator=random).to(device))
        self.head = nn.Parameter((torch.randn(V, H, generator=random) * H**-0.5).to(device))
        self.bias = nn.Parameter(torch.zeros(V, device=device))
        self.loss_fn = loss_fn

    def forward(self, inputs: Tensor, ids: Tensor, *rest: Tensor, **options: Tensor) -> Any:
        hidden = torch.tanh(self.states[inputs])
        return self.loss_fn(hidden, self.head, ids, *rest, bias=self.bias, **options)


def batch(step: int, device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """4 sequences of 1 to 40 tokens; an action is rewarded where it follows its input."""
    random = torch.Generator().manual_seed(step)
    T = 1 + int(torch.randint(40, (), generator=random))
    inputs, ids = torch.randint(V, (2, 4, T), generator=random)
    ids = torch.where(torch.rand(4, T, generator=random) < 0.3, (inputs + 1) % V, ids)
    mask = torch.rand(4, T, generator=random) < 0.8
    advantages = (ids == (inputs + 1) % V).float()
    ref = torch.full((4, T), -4.5)
    tensors = [inputs, ids, mask, advantages]
    return [x.to(device) for x in tensors], {"ref_logps": ref.to(device)}


def run(
    loss_fn: Callable[..., Any], steps: int, device: str, seen: Callable[[int], None]
) -> Tensor:
    """Losses of `steps` steps of SGD; `seen(step)` is called after each."""
    policy = Policy(loss_fn, device)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    losses = torch.zeros(steps, device=device)
    for step in range(steps):
        inputs, options = batch(step, device)
        loss = policy(*inputs, **options).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        seen(step)
    return losses.double().cpu()


def full_logits(config: RatioKLConfig, order: Tensor) -> Callable[..., Any]:
    """The reference; its sums over V and over H run in another order for another `order`."""

    def loss_fn(hidden: Tensor, weight: Tensor, *rest: Tensor, **options: Tensor) -> Any:
        return reference_loss(config, hidden[..., order], weight[:, order], *rest, **options)

    return loss_fn


def assert_follows(ours: Tensor, steps: int, device: str) -> None:
    """No further from full logits than two orders of summation there are from one another."""
    order = torch.arange(H, device=device)
    wanted, other = (
        run(full_logits(CONFIG, order), steps, device, lambda step: None)
        for order in (order, order.flip(0))
    )
    fifth = steps // 5
    assert wanted[-fifth:].mean() < 0.6 * wanted[:fifth].mean(), "nothing was learned"
    drift = (other - wanted).abs().max().item()
    off = (ours - wanted).abs().max().item()
    # Two runs each have their own drift: five times one of them is far from any mistake.
    assert off <= 5 * drift + 1e-6, (
        f"off by {off:.3g} where two full-logits runs are by {drift:.3g}"
    )


class Memory:
    """Live tensors and the process's largest size, after a quarter of the steps and at the end."""

    def __init__(self, steps: int) -> None:
        self.at = {steps // 4: (0, 0), steps - 1: (0, 0)}

    def __call__(self, step: int) -> None:
        if step in self.at:
            gc.collect()
            tensors = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
            self.at[step] = tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def assert_flat(self) -> None:
        (few, early), (many, late) = self.at.values()
        assert many <= few
        # KiB; 1,500 steps that leaked one [160, H] tensor each would take 15 MiB.
        assert late - early <= 8 * 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiled", [False, True])
def test_two_thousand_steps(compiled: bool) -> None:
    steps = 2000
    loss_fn = FusedLinearRatioKLLoss(CONFIG)
    counter = CompileCounterWithBackend("aot_eager")
    if compiled:
        torch._dynamo.reset()
        loss_fn = torch.compile(loss_fn, backend=counter, dynamic=True, fullgraph=True)
    memory, frames = Memory(steps), {}

    def seen(step: int) -> None:
        memory(step)
        frames[step] = counter.frame_count

    losses = run(loss_fn, steps, "cpu", seen)
    memory.assert_flat()
    if compiled:
        # A length of 1 is a variant of its own; every kind of batch came within 100 steps.
        assert frames[steps - 1] == frames[100] <= 3
    assert_follows(losses, steps, "cpu")


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_five_hundred_steps() -> None:
    steps = 500
    allocated: dict[int, int] = {}

    def seen(step: int) -> None:
        if step in (100, steps - 1):
            allocated[step] = torch.cuda.memory_allocated()

    losses = run(FusedLinearRatioKLLoss(CONFIG), steps, "cuda", seen)
    # The batches of two steps differ by less than 64 KiB.
    assert allocated[steps - 1] - allocated[100] <= 2**16
    assert_follows(losses, steps, "cuda")

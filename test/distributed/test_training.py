"""A small model whose forward calls the loss, trained one step over ranks and in one process.

The sizes are those at which shards are uneven: 13 rows of the head over 2, 3 and 4 ranks.
"""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ratio_kl import FusedLinearRatioKLLoss
from support import FLOAT64_TOLERANCE, assert_close

V, H, B, T = 13, 4, 12, 5
UNEVEN = {2: [12, 0], 3: [7, 0, 5], 4: [7, 0, 1, 4]}
"""Sequences of each rank; one has none."""
TWO = pytest.mark.parametrize("ranks", [2], indirect=True)


class Batch(NamedTuple):
    """B sequences: the tokens that the model reads and the actions that it is to score."""

    ids: Tensor
    action_ids: Tensor
    mask: Tensor
    advantages: Tensor
    old_logps: Tensor
    ref_logps: Tensor


def draw(seed: int) -> Batch:
    """Lengths 0 to T; log-probabilities around those of a model that knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids, actions = torch.randint(V, (2, B, T), generator=generator)
    mask = torch.arange(T) < torch.randint(T + 1, (B, 1), generator=generator)
    old, ref = 0.3 * torch.randn(2, B, T, generator=generator, dtype=torch.float64) - 2.6
    advantages = torch.randn(B, generator=generator, dtype=torch.float64)
    return Batch(ids, actions, mask, advantages, old, ref)


def share(batch: Batch, counts: list[int], rank: int) -> Batch:
    """Rank r's sequences, counts[r] of them."""
    first = sum(counts[:rank])
    return Batch(*(value[first : first + counts[rank]] for value in batch))


@dataclass(frozen=True)
class Variant:
    """How a Policy is built; q < 1, so that the ranks also share a threshold."""

    loss_type: str = "dapo"
    q: float = 0.5
    grads: str = "backward"
    tied: bool = False
    frozen: bool = False
    checkpointed: bool = False
    bias: bool = False


VARIANTS = {
    "plain": Variant(),
    "every token": Variant(q=1.0),
    "forward": Variant(grads="forward"),
    "tied": Variant(tied=True),
    "tied, forward": Variant(tied=True, grads="forward"),
    "frozen head": Variant(frozen=True),
    "checkpointed": Variant(checkpointed=True),
    "bias": Variant(bias=True),
    "grpo": Variant(loss_type="grpo"),
}


class Policy(nn.Module):
    """Embedding, one layer and an lm_head; its forward returns the loss and builds no logits."""

    def __init__(self, variant: Variant):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(V, H, dtype=torch.float64)
        self.body = nn.Sequential(nn.Linear(H, H, dtype=torch.float64), nn.Tanh())
        self.lm_head = nn.Linear(H, V, bias=variant.bias, dtype=torch.float64)
        if variant.tied:
            self.lm_head.weight = self.embed.weight
        self.lm_head.weight.requires_grad_(not variant.frozen)
        self.checkpointed = variant.checkpointed
        self.loss_fn = FusedLinearRatioKLLoss(
            loss_type=variant.loss_type,
            beta=0.04,
            top_entropy_quantile=variant.q,
            grads=variant.grads,
        )

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.body(self.embed(batch.ids))
        if self.checkpointed:
            return checkpoint(self.loss, hidden, batch, use_reentrant=False)
        return self.loss(hidden, batch)

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        _, *arguments = batch
        head = self.lm_head
        return self.loss_fn(hidden, head.weight, *arguments, bias=head.bias).loss


def train(model: nn.Module, wrapped: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """How far one step of SGD at rate 1 moves each parameter: its gradient, as training uses it."""
    before = {name: whole(value) for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    wrapped(batch).backward()
    optimizer.step()
    return {name: whole(value) - before[name] for name, value in model.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


def sharded(model: Policy, reshard: bool) -> nn.Module:
    """FSDP2: a layer by itself, and the rest, the head among it, gathered around forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp2, kept": partial(sharded, reshard=False),
    "fsdp2, resharded": partial(sharded, reshard=True),
}


@contextmanager
def deprecations_of_fsdp2():
    """FSDP2 itself calls collectives that newer releases of torch deprecate."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
        yield


@deprecations_of_fsdp2()
def steps_on_ranks(rank, size, wrapper, cases):
    moved = []
    for name, counts in cases:
        model = Policy(VARIANTS[name])
        moved.append(train(model, WRAPPERS[wrapper](model), share(draw(0), counts, rank)))
    return moved


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_over_ranks_is_the_step_of_one_process(ranks, wrapper):
    """dapo: one rank has no sequence; grpo: equally many sequences, not tokens."""
    even = ranks.size * [B // ranks.size]
    cases = [(name, even if name == "grpo" else UNEVEN[ranks.size]) for name in VARIANTS]
    found = ranks.run(steps_on_ranks, wrapper, cases)
    for name, *of_ranks in zip(VARIANTS, *found, strict=True):
        model = Policy(VARIANTS[name])
        expected = train(model, model, draw(0))
        for rank, moved in enumerate(of_ranks):
            assert set(moved) == set(expected)
            for parameter, wanted in expected.items():
                what = f"{name}, rank {rank}: {parameter}"
                assert_close(moved[parameter], wanted, FLOAT64_TOLERANCE, what)
        head_moves = bool(expected.get("lm_head.weight", expected["embed.weight"]).any())
        assert head_moves != VARIANTS[name].frozen


def test_a_tied_head_is_trained_from_both_ends():
    """Its gradient is the sum of the embedding's and the head's, else the ranks above agree on
    half of it."""
    batch, moved = draw(0), {}
    for name in ("plain", "tied"):
        model = Policy(VARIANTS[name])
        if name == "plain":
            model.lm_head.weight.data.copy_(model.embed.weight.data)
        moved[name] = train(model, model, batch)
    both = moved["plain"]["embed.weight"] + moved["plain"]["lm_head.weight"]
    assert_close(moved["tied"]["embed.weight"], both, FLOAT64_TOLERANCE, "embed.weight")


class Gathers(TorchDispatchMode):
    """Records how many elements each of FSDP2's all-gathers brings together."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("c10d._allgather_base_"):
            self.sizes.append(args[0].numel())
        return function(*args, **(kwargs or {}))


@deprecations_of_fsdp2()
def gathers_on_ranks(rank, size, reshard, variant):
    wrapped = sharded(Policy(VARIANTS[variant]), reshard)
    with Gathers() as forward:
        loss = wrapped(share(draw(0), UNEVEN[size], rank))
    with Gathers() as backward:
        loss.backward()
    return [sum(n >= V * H for n in passed.sizes) for passed in (forward, backward)]


@TWO
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("variant", ["plain", "forward", "tied", "checkpointed"])
def test_the_head_is_gathered_at_most_once_a_pass(ranks, reshard, variant):
    """Only the group that holds the head is as large as the head."""
    for found in ranks.run(gathers_on_ranks, reshard, variant):
        assert found == [1, 1 if reshard else 0]


# DTensors


@deprecations_of_fsdp2()
def refused_on_ranks(rank, size):
    """The error for a head that FSDP2 shards by itself, and for DTensors as each argument."""
    batch = draw(0)
    model = Policy(VARIANTS["bias"])
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.lm_head, mesh=mesh)
    messages = [error_of(lambda: model(batch))]
    plain = Policy(VARIANTS["bias"])
    hidden = plain.body(plain.embed(batch.ids)).detach()
    weight, bias = plain.lm_head.weight, plain.lm_head.bias
    for placement in (Shard(0), Replicate()):
        spread = partial(distribute_tensor, device_mesh=mesh, placements=[placement])
        for arguments in (
            {"weight": spread(weight), "hidden": hidden, "bias": bias},
            {"weight": weight, "hidden": spread(hidden), "bias": bias},
            {"weight": weight, "hidden": hidden, "bias": spread(bias)},
        ):
            messages.append(
                error_of(lambda given=arguments: plain.loss_fn(**given, **call_of(batch)))
            )
    return messages


def call_of(batch: Batch) -> dict[str, Tensor]:
    """Everything but hidden and the head, by the loss's names."""
    return {
        "action_ids": batch.action_ids,
        "attention_mask": batch.mask,
        "advantages": batch.advantages,
        "old_logps": batch.old_logps,
        "ref_logps": batch.ref_logps,
    }


def error_of(call) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@TWO
def test_a34_a_dtensor_is_refused(ranks):
    """Mixed Tensor and DTensor, or a pointer to the local shard (huggingface/trl#6064,
    apple/ml-cross-entropy#31)."""
    names = ["weight", *2 * ["weight", "hidden", "bias"]]
    for messages in ranks.run(refused_on_ranks):
        for name, message in zip(names, messages, strict=True):
            assert message is not None, name
            assert message.startswith(f"ValueError: {name} is a DTensor"), message
            assert "full_tensor" in message


def gathered_by_hand_on_ranks(rank, size):
    """The weight's gradient, from a sharded head that the caller gathers."""
    batch = share(draw(0), UNEVEN[size], rank)
    model = Policy(VARIANTS["plain"])
    mesh = init_device_mesh("cpu", (size,))
    weight = distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]).requires_grad_()
    hidden = model.body(model.embed(batch.ids)).detach()
    full = weight.full_tensor(grad_placements=[Partial("avg")])
    model.loss_fn(hidden, full, **call_of(batch)).loss.backward()
    return weight.grad.full_tensor()


def test_a_weight_that_the_caller_gathers(ranks):
    """Its gradient goes back to the shards, averaged over the ranks."""
    model = Policy(VARIANTS["plain"])
    model(draw(0)).backward()
    for found in ranks.run(gathered_by_hand_on_ranks):
        assert_close(found, model.lm_head.weight.grad, FLOAT64_TOLERANCE, "weight.grad")


# ZeRO-3: the weight is whole while the module's forward runs, and nowhere else


def empty_storage(weight: Tensor) -> None:
    weight.untyped_storage().resize_(0)


def leave_size_zero(weight: Tensor) -> None:
    """Until its gradient is accumulated, for which torch wants the parameter in its shape."""

    def restore(gradient: Tensor) -> None:
        weight.data = torch.full_like(gradient, torch.nan)

    weight.register_hook(restore)
    empty_storage(weight)
    weight.data = torch.empty(0, dtype=weight.dtype)


@pytest.mark.parametrize("name", ["plain", "tied", "bias"])
@pytest.mark.parametrize("release", [empty_storage, leave_size_zero])
def test_nothing_reads_the_weight_after_forward(release, name):
    """Both ways in which sharding frees a parameter; the loss is scaled afterwards."""
    batch = draw(0)
    kept = Policy(VARIANTS[name])
    (3 * kept(batch)).backward()
    model = Policy(replace(VARIANTS[name], grads="forward"))
    loss = 3 * model(batch)
    release(model.lm_head.weight)
    loss.backward()
    for (name, parameter), wanted in zip(model.named_parameters(), kept.parameters(), strict=True):
        assert_close(parameter.grad, wanted.grad, FLOAT64_TOLERANCE, name)


class ZeroThree:
    """Keeps a model's head whole in its forward and for the accumulation of its gradient only."""

    def __init__(self, model: Policy, rank: int, size: int):
        self.weight, self.size = model.lm_head.weight, size
        self.shape = self.weight.shape
        flat = self.weight.detach().flatten()
        self.shard = nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size)[rank].clone()
        model.register_forward_pre_hook(self.gather)
        model.register_forward_hook(self.release)
        self.weight.register_hook(self.average)
        self.release()

    def gather(self, *_) -> None:
        shards = [torch.empty_like(self.shard) for _ in range(self.size)]
        dist.all_gather(shards, self.shard)
        self.weight.data = torch.cat(shards)[: self.shape.numel()].view(self.shape)

    def release(self, *_) -> None:
        empty_storage(self.weight)
        self.weight.data = self.shard.new_empty(0)

    def average(self, gradient: Tensor) -> Tensor:
        self.gather()
        total = gradient.clone()
        dist.all_reduce(total)
        return total / self.size


def zero_three_on_ranks(rank, size):
    model = Policy(VARIANTS["forward"])
    ZeroThree(model, rank, size)
    batch = share(draw(0), UNEVEN[size], rank)
    outside = error_of(lambda: model.loss(model.body(model.embed(batch.ids)), batch))
    loss = model(batch)
    at_backward = tuple(model.lm_head.weight.shape)
    loss.backward()
    return outside, at_backward, model.lm_head.weight.grad


def test_zero_three_trains_with_gradients_made_in_forward(ranks):
    """A33: the loss outside the forward read a weight of size 0 (huggingface/trl#3368), and pass 2
    one that had gone (linkedin/Liger-Kernel#1048)."""
    model = Policy(VARIANTS["plain"])
    model(draw(0)).backward()
    for outside, at_backward, gradient in ranks.run(zero_three_on_ranks):
        assert outside.startswith("ValueError: weight is empty")
        assert at_backward == (0,)
        assert_close(gradient, model.lm_head.weight.grad, FLOAT64_TOLERANCE, "weight.grad")


@pytest.mark.parametrize("shape", [(0,), (0, H)], ids=str)
@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_a33_a_weight_of_size_zero_is_refused(shape, grads):
    """A size mismatch or a division by zero far from the cause (huggingface/trl#3368)."""
    batch, loss_fn = draw(0), FusedLinearRatioKLLoss(grads=grads)
    hidden = torch.zeros(B, T, H)
    pattern = r"weight is empty \(shape \[0.*expected \[V, H\].*must be gathered around this call"
    with pytest.raises(ValueError, match=pattern):
        loss_fn(hidden, torch.zeros(shape), batch.action_ids, batch.mask, batch.advantages)
    with pytest.raises(ValueError, match=f"ref_{pattern}"):
        FusedLinearRatioKLLoss(beta=0.1, grads=grads)(
            hidden,
            torch.zeros(V, H),
            batch.action_ids,
            batch.mask,
            batch.advantages,
            ref_hidden=hidden,
            ref_weight=torch.zeros(shape),
        )

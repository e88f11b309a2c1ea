"""The same over NCCL: two GPUs of one host, the Triton backend, equal to one GPU.

Each check runs on both ranks; a rank computes the whole problem on its own GPU too, and returns
how far its part is from that. 512 rows, 5,000 columns: several tiles each way, the last ones odd.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed.groups import group_of
from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig, linear_logprob
from ratio_kl.distributed.groups import resolve
from ratio_kl.distributed.quantile import masked_quantile
from support import Problem, Result, problem, relative_error, run

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA GPUs, for NCCL; torch sees {GPUS} here"),
]

B, T, H, V = 8, 64, 256, 5_000
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of gradients, relative: two orders of summation, and one rounding to the leaf's dtype."""
LOGP_TOLERANCE = 1e-4
"""Absolute, of fp32 logits of size up to 60, computed in two tilings."""
CUTS = [(2_500, 2_500), (1_000, 4_000), (2_560, 2_560)]


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def given_on(rank: int, seed: int, config: RatioKLConfig, dtype: torch.dtype, **options) -> Problem:
    return problem(
        seed,
        config,
        B=B,
        T=T,
        H=H,
        V=V,
        dtype=dtype,
        device=str(device_of(rank)),
        reference="none",
        **options,
    )


def distances(found: Result, wanted: Result) -> dict[str, float]:
    """By how much the logps, the loss and each gradient differ."""
    logps = (found.outputs["logps"] - wanted.outputs["logps"]).abs().max().item()
    scale = max(1.0, wanted.loss.abs().item())
    grads = {name: relative_error(found.grads[name], wanted.grads[name]) for name in wanted.grads}
    return {"logps": logps, "loss": (found.loss - wanted.loss).abs().item() / scale, **grads}


def assert_near(of_ranks: list[dict[str, float]], dtype: torch.dtype, what: object) -> None:
    limits = {"logps": LOGP_TOLERANCE, "loss": TOLERANCE[torch.float32]}
    for rank, found in enumerate(of_ranks):
        for name, distance in found.items():
            limit = limits.get(name, TOLERANCE[dtype])
            assert distance <= limit, f"{what}, rank {rank}: {name} off by {distance:.3g}"


def alone(config: RatioKLConfig, given: Problem) -> Result:
    return run(FusedLinearRatioKLLoss(config, process_group="local"), given)


# What ranks with other sequences share


def quantiles_on_gpus(rank, size, values, counts, quantile):
    start = sum(counts[:rank])
    mine = values[start : start + counts[rank]].to(device_of(rank))
    mask = torch.ones_like(mine, dtype=torch.bool)
    routes = ("gather", "histogram", None)
    return [masked_quantile(mine, mask, quantile, resolve(), route).item() for route in routes]


@pytest.mark.parametrize("counts", [(700, 300), (1000, 0), (0, 1), (20_000, 20_001)])
@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.8, 1.0])
def test_the_quantile_by_both_routes(gpus, counts, quantile):
    values = torch.randn(sum(counts)).relu()
    expected = torch.quantile(values, quantile).item()
    for found in gpus.run(quantiles_on_gpus, values, counts, quantile):
        assert found == 3 * [expected]


def sequences_of(given: Problem, rows: slice) -> Problem:
    def take(value: object) -> object:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != B:
            return value
        return value.detach()[rows].requires_grad_(value.requires_grad)

    hidden, weight, *rest = given.inputs
    options = {name: take(value) for name, value in given.options.items()}
    return Problem((take(hidden), weight, *(take(value) for value in rest)), options)


def averages_on_gpus(rank, size, config, dtype, cut):
    given = given_on(rank, 0, config, dtype)
    wanted = alone(config, given)
    rows = slice(0, cut) if rank == 0 else slice(cut, B)
    found = run(FusedLinearRatioKLLoss(config), sequences_of(given, rows))
    loss, d_weight = found.loss, found.grads["weight"].float()
    for value in (loss, d_weight):
        dist.all_reduce(value)
    return {
        "loss": (loss / size - wanted.loss).abs().item(),
        "weight": relative_error(d_weight / size, wanted.grads["weight"]),
        "hidden": relative_error(found.grads["hidden"] / size, wanted.grads["hidden"][rows]),
    }


@DTYPES
@pytest.mark.parametrize("cut", [5, 0])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_normalisers_and_threshold_over_uneven_ranks(gpus, loss_type, cut, dtype):
    """A rank without a sequence too."""
    config = RatioKLConfig(loss_type=loss_type, top_entropy_quantile=0.5)
    assert_near(gpus.run(averages_on_gpus, config, dtype, cut), dtype, config)


def bad_id_on_gpus(rank, size, config):
    given = given_on(rank, 0, config, torch.float32)
    ids = given.inputs[2].clone()
    if rank == 1:
        ids[given.inputs[3] != 0] = V
    loss_fn = FusedLinearRatioKLLoss(config, validate="eager")
    try:
        loss_fn(*given.with_inputs(action_ids=ids).inputs, **given.options)
    except ValueError as error:
        return str(error)


def test_a_bad_id_raises_on_both(gpus):
    for message in gpus.run(bad_id_on_gpus, RatioKLConfig()):
        assert "action_ids must lie in [0, 5000)" in message


class Policy(nn.Module):
    """Embedding, one layer and an lm_head, whose forward calls the loss."""

    def __init__(self, device: torch.device, process_group: object):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(V, H)
        self.body = nn.Sequential(nn.Linear(H, H), nn.Tanh())
        self.lm_head = nn.Linear(H, V, bias=False)
        self.loss_fn = FusedLinearRatioKLLoss(top_entropy_quantile=0.5, process_group=process_group)
        self.to(device)

    def forward(self, ids, mask, advantages):
        hidden = self.body(self.embed(ids))
        return self.loss_fn(hidden, self.lm_head.weight, ids.roll(-1, 1), mask, advantages).loss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def step_on_gpus(rank, size, wrapper):
    device = device_of(rank)
    torch.manual_seed(0)
    ids, mask = torch.randint(V, (B, T), device=device), torch.rand(B, T, device=device) < 0.8
    advantages = torch.randn(B, device=device)
    ids, mask, advantages = (_from_first(value) for value in (ids, mask, advantages))
    whole, model = Policy(device, "local"), Policy(device, None)
    whole(ids, mask, advantages).backward()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, (size,))
        fully_shard(model.body, mesh=mesh, reshard_after_forward=wrapper == "fsdp2, resharded")
        wrapped = fully_shard(model, mesh=mesh)
    rows = slice(0, 5) if rank == 0 else slice(5, B)
    wrapped(ids[rows], mask[rows], advantages[rows]).backward()
    wanted = gradients_of(whole)
    return {name: relative_error(g, wanted[name]) for name, g in gradients_of(model).items()}


def _from_first(tensor: Tensor) -> Tensor:
    sent = tensor.to(torch.float32)
    dist.broadcast(sent, 0)
    return sent.to(tensor.dtype)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2, kept", "fsdp2, resharded"])
def test_a_step_is_the_step_of_one_gpu(gpus, wrapper):
    assert_near(gpus.run(step_on_gpus, wrapper), torch.float32, wrapper)


# A head cut by rows


def rows_of(weight: Tensor, cut: tuple[int, int], rank: int) -> Tensor:
    padding = weight.new_full((sum(cut) - weight.shape[0], *weight.shape[1:]), torch.nan)
    return torch.cat([weight.detach(), padding]).split(cut)[rank].clone().requires_grad_()


def head_on_gpus(rank, size, config, dtype, cut, knobs):
    """Distances, with the current device another than the tensors' if `elsewhere`."""
    knobs = dict(knobs)
    elsewhere, compiled = knobs.pop("elsewhere", False), knobs.pop("compiled", False)
    given = given_on(rank, 1, config, dtype, bias=True)
    wanted = alone(config, given)
    hidden, weight, *rest = given.inputs
    options = given.options | {"bias": rows_of(given.options["bias"], cut, rank)}
    part = Problem((hidden, rows_of(weight, cut, rank), *rest), options)
    loss_fn = FusedLinearRatioKLLoss(
        config, tp_group=group_of(range(size)), process_group="local", **knobs
    )
    if compiled:
        loss_fn = torch.compile(loss_fn, fullgraph=True)
    with torch.cuda.device(1 - rank) if elsewhere else nullcontext():
        found = run(loss_fn, part)
    if knobs.get("tp_hidden_grad") == "part":
        whole = found.grads["hidden"].float()
        dist.all_reduce(whole)
        found.grads["hidden"] = whole
    rows = slice(sum(cut[:rank]), min(sum(cut[: rank + 1]), V))
    for name in ("weight", "bias"):
        assert (found.grads[name][rows.stop - rows.start :] == 0).all()
        found.grads[name] = found.grads[name][: rows.stop - rows.start]
        wanted.grads[name] = wanted.grads[name][rows]
    return distances(found, wanted)


@DTYPES
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "knobs", [{}, {"grads": "forward"}, {"tp_hidden_grad": "part"}], ids=["", "forward", "part"]
)
def test_a_head_that_is_cut(gpus, dtype, cut, knobs):
    config = RatioKLConfig(vocab_size=V, softcap=30.0, entropy_coef=0.1, top_entropy_quantile=0.5)
    assert_near(gpus.run(head_on_gpus, config, dtype, cut, knobs), dtype, cut)


@pytest.mark.parametrize("chunk_bytes", [2**20, 2**28])
def test_a_head_that_is_cut_in_many_blocks_and_in_one(gpus, chunk_bytes):
    """The sum over ranks starts before the last product of the weight's gradient."""
    found = gpus.run(
        head_on_gpus,
        RatioKLConfig(vocab_size=V),
        torch.bfloat16,
        CUTS[1],
        {"chunk_bytes": chunk_bytes},
    )
    assert_near(found, torch.bfloat16, chunk_bytes)


def test_a45_the_current_device_is_another(gpus):
    """Launches on the wrong GPU (linkedin/Liger-Kernel#1303)."""
    config = RatioKLConfig(vocab_size=V)
    found = gpus.run(head_on_gpus, config, torch.bfloat16, CUTS[0], {"elsewhere": True})
    assert_near(found, torch.bfloat16, "elsewhere")


def test_a_head_that_is_cut_compiles_in_one_graph(gpus):
    config = RatioKLConfig(vocab_size=V, top_entropy_quantile=0.5)
    found = gpus.run(head_on_gpus, config, torch.float32, CUTS[0], {"compiled": True})
    assert_near(found, torch.float32, "compiled")


def frozen_on_gpus(rank, size, trained):
    config = RatioKLConfig(vocab_size=V)
    given = given_on(rank, 2, config, torch.float32)
    wanted = alone(config, given)
    hidden, weight, *rest = (value.detach() for value in given.inputs)
    own = rows_of(weight, CUTS[0], rank).detach().requires_grad_("weight" in trained[rank])
    hidden.requires_grad_("hidden" in trained[rank])
    loss_fn = FusedLinearRatioKLLoss(config, tp_group=group_of(range(size)), process_group="local")
    loss_fn(hidden, own, *rest, **given.options).loss.backward()
    if hidden.grad is None:
        return {}
    return {"hidden": relative_error(hidden.grad, wanted.grads["hidden"])}


@pytest.mark.parametrize("trained", [(("weight",), ("hidden",)), ((), ("hidden", "weight"))])
def test_ranks_with_different_requires_grad_finish(gpus, trained):
    assert_near(gpus.run(frozen_on_gpus, trained), torch.float32, trained)


def invariance_on_gpus(rank, size, dtype):
    """Whether each row's scores are bitwise those of the whole batch, and equal on both ranks."""
    given = given_on(rank, 3, RatioKLConfig(), dtype, poison=False)
    hidden, weight, ids, *_ = (value.detach() for value in given.inputs)
    hidden, ids = hidden.flatten(0, 1), ids.flatten()
    own, group = rows_of(weight, CUTS[1], rank).detach(), group_of(range(size))

    def score(rows, mask=None):
        return linear_logprob(
            hidden[rows],
            own,
            ids[rows],
            mask,
            vocab_size=V,
            return_entropy=True,
            tp_group=group,
        )[:2]

    every = torch.arange(len(ids), device=ids.device)
    whole = score(every)
    same = []
    for rows in (every[:1], every[-1:], every[3:20], every.flip(0), every[:256]):
        same.append(all(torch.equal(a, b[rows]) for a, b in zip(score(rows), whole, strict=True)))
    odd = every % 2 == 1
    masked = score(every, odd)
    same.append(all(torch.equal(a[odd], b[odd]) for a, b in zip(masked, whole, strict=True)))
    return same, [part.cpu() for part in whole]


@DTYPES
def test_a48_a_row_is_bitwise_the_same_in_any_batch(gpus, dtype):
    """RL-Kernel#329, trl#4303."""
    (first, scores), (second, others) = gpus.run(invariance_on_gpus, dtype)
    assert all(first)
    assert all(second)
    assert all(torch.equal(a, b) for a, b in zip(scores, others, strict=True))


def whole_head_on_gpus(rank, size):
    weight, hidden = (torch.ones(n, 16, device=device_of(rank)) for n in (64, 4))
    ids = torch.arange(4, device=device_of(rank))
    try:
        linear_logprob(hidden, weight, ids, vocab_size=64, tp_group=group_of(range(size)))
    except ValueError as error:
        return str(error)


def test_a_whole_head_is_an_error_on_both(gpus):
    for message in gpus.run(whole_head_on_gpus):
        assert "every rank holds the whole head" in message


# Sequences cut over ranks


def tokens_of(given: Problem, own: slice) -> Problem:
    def take(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape[:2] != (B, T):
            return value
        return value.detach()[:, own].requires_grad_(value.requires_grad)

    hidden, weight, *rest = given.inputs
    options = {name: take(value) for name, value in given.options.items()}
    return Problem((take(hidden), weight, *(take(value) for value in rest)), options)


def context_on_gpus(rank, size, config, dtype, interleaved, compiled):
    given = given_on(rank, 4, config, dtype)
    wanted = alone(config, given)
    own = slice(rank, T, 2) if interleaved else [slice(0, 20), slice(20, T)][rank]
    loss_fn = FusedLinearRatioKLLoss(config, cp_group=group_of(range(size)), process_group="local")
    if compiled:
        loss_fn = torch.compile(loss_fn, fullgraph=True)
    found = run(loss_fn, tokens_of(given, own))
    loss, d_weight = found.loss, found.grads["weight"].float()
    for value in (loss, d_weight):
        dist.all_reduce(value)
    return {
        "loss": (loss - wanted.loss).abs().item(),
        "logps": (found.outputs["logps"] - wanted.outputs["logps"][:, own]).abs().max().item(),
        "weight": relative_error(d_weight, wanted.grads["weight"]),
        "hidden": relative_error(found.grads["hidden"], wanted.grads["hidden"][:, own]),
        **{
            f"metric {name}": (value.double() - wanted.metrics[name].double()).abs().item()
            for name, value in found.metrics.items()
            if name in ("policy_loss", "ratio_mean", "entropy", "clip_fraction")
        },
    }


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("dapo", "token"), ("grpo", "sequence"), ("sapo", "sequence_token"), ("vespo", "token")],
)
def test_sequences_that_are_cut(gpus, dtype, interleaved, loss_type, level):
    config = RatioKLConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        entropy_coef=0.1,
        top_entropy_quantile=0.5,
    )
    found = gpus.run(context_on_gpus, config, dtype, interleaved, False)
    assert_near(found, dtype, config)


def test_sequences_that_are_cut_compile_in_one_graph(gpus):
    config = RatioKLConfig(loss_type="grpo", importance_sampling_level="sequence")
    found = gpus.run(context_on_gpus, config, torch.float32, True, True)
    assert_near(found, torch.float32, "compiled")

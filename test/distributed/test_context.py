"""Sequences cut over ranks: the sum of the ranks' parts is the whole loss, and never a hang.

A cut says which positions of each sequence lie on which rank. Everything is float64.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.groups import group_of, recorded_collectives
from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig
from ratio_kl.distributed import shared_sum
from support import FLOAT64_TOLERANCE, Problem, Result, assert_close, problem, run

B, T, V = 6, 12, 11
LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"max_completion_length": 9},
    "dapo": {"epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.3},
    "sapo": {},
    "vespo": {},
    "luspo": {},
}
LEVELS = ("token", "sequence", "sequence_token")
TWO = pytest.mark.parametrize("ranks", [2], indirect=True)
FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)
PER_TOKEN = ("old_logps", "ref_logps", "sampling_logps", "sampling_ratio", "temperature")


def cuts(size: int) -> dict[str, list[list[int]]]:
    """Positions of each rank: in a row and uneven, interleaved, and all on the last rank."""
    edges = [0, 1, *sorted(T - step for step in range(size - 1))]
    return {
        "contiguous": [list(range(edges[rank], edges[rank + 1])) for rank in range(size)],
        "interleaved": [list(range(rank, T, size)) for rank in range(size)],
        "one rank": [*([] for _ in range(size - 1)), list(range(T))],
    }


def part_of(given: Problem, positions: list[int]) -> Problem:
    """A rank's tokens of every sequence; what a sequence has one of stays."""

    def take(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape[:2] != (B, T):
            return value
        return value.detach()[:, positions].requires_grad_(value.requires_grad)

    hidden, weight, *rest = given.inputs
    options = {name: take(value) for name, value in given.options.items()}
    return Problem((take(hidden), weight, *(take(value) for value in rest)), options)


def packed(part: Problem, counts: list[int]) -> Problem:
    """The first `counts` tokens of each sequence in a row, then two that belong to none."""
    keep = torch.arange(part.inputs[2].shape[1]) < torch.tensor(counts)[:, None]

    def flat(value: Tensor) -> Tensor:
        if not isinstance(value, Tensor) or value.shape[:2] != keep.shape:
            return value
        chosen = value.detach()[keep]
        chosen = torch.cat([chosen, chosen.new_zeros((2, *chosen.shape[1:]))])
        return chosen.requires_grad_(value.requires_grad)

    hidden, weight, *rest = part.inputs
    offsets = torch.tensor([0, *counts]).cumsum(0)
    options = {name: flat(value) for name, value in part.options.items()}
    inputs = (flat(hidden), weight, *(flat(value) for value in rest))
    return Problem(inputs, options | {"cu_seqlens": offsets})


def results_on_ranks(rank, size, cases):
    """The result of each case (config, knobs, part of each rank)."""
    group = group_of(range(size))
    return [
        run(
            FusedLinearRatioKLLoss(config, cp_group=group, process_group="local", **knobs),
            parts[rank],
        )
        for config, knobs, parts in cases
    ]


def assert_parts(found: list[Result], alone: Result, positions: list[list[int]], what: str):
    """The ranks' parts add up to the whole, and every rank has its metrics."""
    total = sum(result.loss for result in found)
    assert_close(total, alone.loss, FLOAT64_TOLERANCE, f"{what}: loss")
    for leaf in alone.grads:
        if leaf != "hidden":
            total = sum(result.grads[leaf] for result in found)
            assert_close(total, alone.grads[leaf], FLOAT64_TOLERANCE, f"{what}: {leaf}.grad")
    for result, own in zip(found, positions, strict=True):
        for name, value in alone.metrics.items():
            assert_close(result.metrics[name], value, FLOAT64_TOLERANCE, f"{what}: {name}")
        wanted = alone.grads["hidden"][:, own]
        assert_close(result.grads["hidden"], wanted, FLOAT64_TOLERANCE, f"{what}: hidden.grad")
        for name, output in alone.outputs.items():
            if output is not None:
                assert_close(result.outputs[name], output[:, own], FLOAT64_TOLERANCE, name)


def assert_as_one_process(ranks, cases):
    """Each case is (config, knobs, problem)."""
    sent, names = [], []
    for config, knobs, given in cases:
        for name, positions in cuts(ranks.size).items():
            sent.append((config, knobs, [part_of(given, own) for own in positions]))
            names.append((config, given, positions, f"{config}, {name}"))
    of_ranks = ranks.run(results_on_ranks, sent)
    for (config, given, positions, name), *found in zip(names, *of_ranks, strict=True):
        alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
        assert_parts(found, alone, positions, name)


def config_of(loss_type: str, level: str, **options) -> RatioKLConfig:
    options = {"beta": 0.04, **LOSSES[loss_type], **options}
    return RatioKLConfig(loss_type=loss_type, importance_sampling_level=level, **options)


def batch(seed: int, config: RatioKLConfig, **options) -> Problem:
    return problem(seed, config, B=B, T=T, H=4, V=V, **options)


@pytest.mark.parametrize("grads", ["backward", "forward"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_equals_the_whole_sequences(ranks, loss_type, grads):
    """Each level; masks with holes, an empty sequence, and NaN at what is inactive."""
    cases = []
    for seed, level in enumerate(LEVELS if loss_type != "vespo" else ("token",)):
        # [B, 1], too, which a rank with one position reads both ways: only vespo adds it up.
        for sampling in ("token", "column" if loss_type == "vespo" else "sequence"):
            config = config_of(loss_type, level, entropy_coef=0.1, off_policy_mask_threshold=0.05)
            given = batch(seed, config, sampling_ratio=sampling, sampling_logps=True)
            cases.append((config, {"grads": grads}, given))
    assert_as_one_process(ranks, cases)


def test_the_other_terms(ranks):
    """Entropy mask, bias-corrected KL, an advantage a token, the step's count, accumulation."""
    cases = []
    for seed, (loss_type, options) in enumerate(
        [
            ("dapo", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}),
            ("bnpo", {"top_entropy_quantile": 0.2, "use_bias_correction_kl": True}),
            ("grpo", {"kl_estimator": "k2", "delta": 1.5, "entropy_coef": 0.1}),
        ]
    ):
        for level in LEVELS:
            config = config_of(loss_type, level, **options)
            given = batch(seed, config, advantages="token", temperature="token")
            cases.append((config, {}, given.given(gradient_accumulation_steps=2)))
            cases.append((config, {}, given.given(num_items_in_batch=77)))
    assert_as_one_process(ranks, cases)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_packed(ranks, loss_type):
    """Every rank has its own cu_seqlens for the same sequences, some of which are empty there."""
    cases, names = [], []
    for level in LEVELS if loss_type != "vespo" else ("token",):
        config = config_of(loss_type, level, entropy_coef=0.1, off_policy_mask_threshold=0.05)
        given = batch(3, config, sampling_logps=True, poison=False)
        lengths = torch.tensor([T, 1, 0, 7, 4, 10])
        mask = given.inputs[3] & (torch.arange(T) < lengths[:, None])
        given = given.with_inputs(attention_mask=mask)
        for positions in cuts(ranks.size).values():
            parts = [
                packed(
                    part_of(given, own),
                    [sum(p < length for p in own) for length in lengths.tolist()],
                )
                for own in positions
            ]
            cases.append((config, {}, parts))
            names.append((config, given))
    of_ranks = ranks.run(results_on_ranks, cases)
    for (config, given), *found in zip(names, *of_ranks, strict=True):
        alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
        for value, what in (("loss", "loss"), ("weight", "weight.grad")):
            of_rank = [r.loss if value == "loss" else r.grads[value] for r in found]
            wanted = alone.loss if value == "loss" else alone.grads[value]
            assert_close(sum(of_rank), wanted, FLOAT64_TOLERANCE, f"{config}: {what}")
        norm = sum(result.grads["hidden"].square().sum() for result in found)
        assert_close(norm, alone.grads["hidden"].square().sum(), FLOAT64_TOLERANCE, "hidden.grad")
        for result in found:
            for name, metric in alone.metrics.items():
                assert_close(result.metrics[name], metric, FLOAT64_TOLERANCE, name)


@TWO
def test_sums_of_one_rank_alone_would_differ(ranks):
    """Else the cuts above would say nothing about whose sums are taken."""
    for loss_type, level in (("grpo", "sequence"), ("grpo", "token"), ("vespo", "token")):
        config = config_of(loss_type, level)
        given = batch(0, config)
        parts = [part_of(given, own) for own in cuts(2)["interleaved"]]
        alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given).loss
        local = sum(
            run(FusedLinearRatioKLLoss(config, process_group="local"), part).loss for part in parts
        )
        assert abs(local - alone) > 1e-3 * abs(alone)


# Beside other groups


def mesh_on_ranks(rank, size, config, parts):
    """Ranks (0, 1) and (2, 3) share sequences, ranks (0, 2) and (1, 3) hold different ones."""
    cp = [group_of([0, 1]), group_of([2, 3])][rank // 2]
    dp = [group_of([0, 2]), group_of([1, 3])][rank % 2]
    found = run(FusedLinearRatioKLLoss(config, cp_group=cp, process_group=dp), parts[rank])
    loss, d_weight = found.loss.clone(), found.grads["weight"].clone()
    for value in (loss, d_weight):
        dist.all_reduce(value)
    return loss / 2, d_weight / 2, found.grads["hidden"] / 2


@FOUR
def test_beside_data_parallel_ranks(ranks):
    """Quantile and token count over all four, averages over two, sums over two."""
    positions = cuts(2)["interleaved"]
    for seed, (loss_type, level, q) in enumerate(
        [
            ("dapo", "token", 0.5),
            ("cispo", "sequence", 1.0),
            ("vespo", "token", 0.5),
            ("grpo", "sequence", 0.5),
        ]
    ):
        config = config_of(loss_type, level, top_entropy_quantile=q)
        given = batch(seed, config)
        hidden, weight, *rest = given.inputs
        parts = []
        for rows in (slice(0, 3), slice(3, 6)):
            options = {name: value[rows] for name, value in given.options.items()}
            leaf = hidden.detach()[rows].requires_grad_()
            half = Problem((leaf, weight, *(value[rows] for value in rest)), options)
            parts += [_positions_of(half, own) for own in positions]
        alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
        for rank, (loss, d_weight, d_hidden) in enumerate(ranks.run(mesh_on_ranks, config, parts)):
            assert_close(loss, alone.loss, FLOAT64_TOLERANCE, "loss")
            assert_close(d_weight, alone.grads["weight"], FLOAT64_TOLERANCE, "weight.grad")
            rows = slice(0, 3) if rank < 2 else slice(3, 6)
            wanted = alone.grads["hidden"][rows][:, positions[rank % 2]]
            assert_close(d_hidden, wanted, FLOAT64_TOLERANCE, "hidden.grad")


def _positions_of(half: Problem, own: list[int]) -> Problem:
    def take(value):
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != (3, T):
            return value
        return value.detach()[:, own].requires_grad_(value.requires_grad)

    hidden, weight, *rest = half.inputs
    options = {name: take(value) for name, value in half.options.items()}
    return Problem((take(hidden), weight, *(take(value) for value in rest)), options)


def cut_both_ways_on_ranks(rank, size, config, parts):
    """Ranks (0, 1) and (2, 3) cut the head, ranks (0, 2) and (1, 3) the sequences."""
    tp = [group_of([0, 1]), group_of([2, 3])][rank // 2]
    cp = [group_of([0, 2]), group_of([1, 3])][rank % 2]
    hidden, weight, *rest = parts[rank // 2].inputs
    rows = slice(0, 4) if rank % 2 == 0 else slice(4, V)
    own = Problem((hidden, weight.detach()[rows].requires_grad_(), *rest), parts[rank // 2].options)
    loss_fn = FusedLinearRatioKLLoss(config, tp_group=tp, cp_group=cp, process_group="local")
    return run(loss_fn, own)


@FOUR
def test_beside_a_head_that_is_cut(ranks):
    positions = cuts(2)["contiguous"]
    for seed, (loss_type, level) in enumerate(
        [("dapo", "sequence"), ("grpo", "sequence_token"), ("vespo", "token")]
    ):
        config = config_of(
            loss_type, level, vocab_size=V, top_entropy_quantile=0.5, entropy_coef=0.1
        )
        given = batch(seed, config)
        parts = [part_of(given, own) for own in positions]
        found = ranks.run(cut_both_ways_on_ranks, config, parts)
        alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
        for first in (0, 1):
            of_head = found[first], found[first + 2]
            rows = slice(0, 4) if first == 0 else slice(4, V)
            wanted = Result(
                alone.loss,
                alone.metrics,
                alone.outputs,
                {"hidden": alone.grads["hidden"], "weight": alone.grads["weight"][rows]},
            )
            assert_parts(list(of_head), wanted, positions, loss_type)


# Every rank sends the same

UNALIKE = ("nothing trains", "no active token", "no token", "frozen weight")


def sent_on_ranks(rank, size, cases, kinds):
    """What each case sends, forward and backward, where every rank is unlike the others."""
    kind, found, group = kinds[rank], [], group_of(range(size))
    for config, grads, given in cases:
        loss_fn = FusedLinearRatioKLLoss(config, grads=grads, cp_group=group, process_group="local")
        hidden, weight, ids, mask, advantages = part_of(
            given, [] if kind == "no token" else [0, 3, 5 + rank]
        ).inputs
        options = part_of(given, [] if kind == "no token" else [0, 3, 5 + rank]).options
        if kind == "no active token":
            mask = torch.zeros_like(mask)
        hidden = hidden.detach().requires_grad_(kind != "nothing trains")
        weight = weight.detach().requires_grad_(kind not in ("nothing trains", "frozen weight"))
        with recorded_collectives() as forward:
            loss = loss_fn(hidden, weight, ids, mask, advantages, **options).loss
        with recorded_collectives() as backward:
            loss.backward()
        found.append((forward, backward))
    return found


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_every_rank_sends_the_same(ranks, grads):
    cases = []
    for loss_type in LOSSES:
        for level in LEVELS if loss_type != "vespo" else ("token",):
            config = config_of(
                loss_type,
                level,
                entropy_coef=0.1,
                top_entropy_quantile=0.5,
                off_policy_mask_threshold=0.05,
                use_bias_correction_kl=True,
            )
            given = batch(1, config, sampling_ratio="token", sampling_logps=True)
            cases.append((config, grads, given))
    of_ranks = ranks.run(sent_on_ranks, cases, UNALIKE[-ranks.size :])
    for (config, _, _), *found in zip(cases, *of_ranks, strict=True):
        assert all(of_rank == found[0] for of_rank in found), config
        forward, backward = found[0]
        assert forward
        assert bool(backward) == (
            grads == "backward" and config.importance_sampling_level == "sequence"
        ), config


def test_what_a_call_sends(ranks):
    """The table of docs/distributed.md, in float64."""
    counts = ("all_reduce", (8,), "torch.int64")
    sums = ("all_gather_into_tensor", (B,), "torch.float64")
    kept = ("all_reduce", (), "torch.int64")
    expected = {
        ("dapo", "token", 0.0): ([counts, sums, _metrics(7)], []),
        ("dapo", "token", 0.1): ([counts, sums, kept, _metrics(7)], []),
        ("grpo", "sequence", 0.0): ([counts, sums, sums, _metrics(4), _metrics(4 * B)], [sums]),
        ("sapo", "sequence_token", 0.0): ([counts, sums, sums, _metrics(7)], []),
        ("cispo", "sequence", 0.0): ([counts, sums, sums, _metrics(4), _metrics(4 * B)], []),
        ("vespo", "token", 0.0): ([counts, sums, sums, _metrics(7)], []),
    }
    cases = []
    for loss_type, level, coefficient in expected:
        config = config_of(loss_type, level, entropy_coef=coefficient)
        cases.append((config, "backward", batch(0, config)))
    kinds = [*UNALIKE[1:], "nothing trains"][: ranks.size]
    for found in ranks.run(sent_on_ranks, cases, kinds):
        for sent, wanted in zip(found, expected.values(), strict=True):
            assert sent == wanted


def _metrics(count):
    return "all_gather_into_tensor", (count,), "torch.float64"


# Values that no rank may overlook


def errors_on_ranks(rank, size, config, parts):
    loss_fn = FusedLinearRatioKLLoss(config, cp_group=group_of(range(size)), process_group="local")
    try:
        loss_fn(*parts[rank].inputs, **parts[rank].options)
    except ValueError as error:
        message = str(error)
    else:
        message = None
    count = torch.ones(())
    dist.all_reduce(count)
    return message, count.item() == size


def test_a_bad_id_on_one_rank_raises_on_every_rank(ranks):
    config = config_of("grpo", "token")
    parts = [part_of(batch(0, config), own) for own in cuts(ranks.size)["interleaved"]]
    ids, mask = parts[-1].inputs[2].clone(), parts[-1].inputs[3].clone()
    ids[0, 0], mask[0, 0] = V, 1
    parts[-1] = parts[-1].with_inputs(action_ids=ids, attention_mask=mask)
    for message, in_step in ranks.run(errors_on_ranks, config, parts):
        assert f"action_ids must lie in [0, {V}) on active tokens" in str(message)
        assert in_step


# torch.compile


def compiled_on_ranks(rank, size, cases):
    """Results of each case, eager and compiled."""
    found, group = [], group_of(range(size))
    for config, parts in cases:
        loss_fn = FusedLinearRatioKLLoss(config, cp_group=group, process_group="local")
        compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
        found.append((run(loss_fn, parts[rank]), run(compiled, parts[rank])))
        torch._dynamo.reset()
    return found


@TWO
def test_compiles_in_one_graph(ranks):
    cases = []
    for loss_type, level, q in (("dapo", "sequence", 0.5), ("vespo", "token", 1.0)):
        config = config_of(loss_type, level, top_entropy_quantile=q)
        given = batch(0, config)
        cases.append((config, [part_of(given, own) for own in cuts(2)["interleaved"]]))
    for of_rank in ranks.run(compiled_on_ranks, cases):
        for eager, compiled in of_rank:
            assert_close(compiled.loss, eager.loss, FLOAT64_TOLERANCE, "loss")
            for leaf, gradient in eager.grads.items():
                assert_close(compiled.grads[leaf], gradient, FLOAT64_TOLERANCE, leaf)


def checked_operators_on_ranks(rank, size):
    """torch's own checks of the operators: schema, fakes, autograd, aot dispatch."""
    group, tensor = group_of(range(size)), torch.randn(3, 2, requires_grad=True)
    torch.library.opcheck(torch.ops.ratio_kl.shared_sum.default, (tensor, group.group_name, size))
    attached = (tensor.detach(), shared_sum.ANCHOR)
    torch.library.opcheck(torch.ops.ratio_kl.attached.default, attached)
    return True


@TWO
def test_the_operators_pass_torchs_checks(ranks):
    assert ranks.run(checked_operators_on_ranks) == [True, True]


def compiled_frozen_on_ranks(rank, size, config, parts):
    loss_fn = FusedLinearRatioKLLoss(config, cp_group=group_of(range(size)), process_group="local")
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    hidden, weight, *rest = (value.detach() for value in parts[rank].inputs)
    hidden.requires_grad_(rank == 0)
    compiled(hidden, weight, *rest, **parts[rank].options).loss.backward()
    torch._dynamo.reset()
    return hidden.grad


@TWO
def test_compiled_where_one_rank_trains_nothing(ranks):
    config = config_of("grpo", "sequence")
    given = batch(0, config)
    positions = cuts(2)["interleaved"]
    parts = [part_of(given, own) for own in positions]
    first, second = ranks.run(compiled_frozen_on_ranks, config, parts)
    alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
    wanted = alone.grads["hidden"][:, positions[0]]
    assert_close(first, wanted, FLOAT64_TOLERANCE, "hidden.grad")
    assert second is None

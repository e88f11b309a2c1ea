"""A head cut by rows over ranks: equal to the whole head on one rank, and never a hang.

Everything is float64 unless it says otherwise. A cut is the rows of each rank; rows beyond the
vocabulary are padding, which holds NaN.
"""

import copy
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cases.meter import metered
from distributed.groups import group_of, quiet_numpy, recorded_collectives
from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig, linear_logprob, linear_ratio_kl
from support import (
    BACKENDS,
    FLOAT64_TOLERANCE,
    Problem,
    Result,
    assert_close,
    assert_same,
    problem,
    relative_error,
    run,
)

V = 150
CUTS = {
    2: [(75, 75), (40, 110), (149, 1), (100, 64)],
    3: [(50, 50, 50), (1, 139, 10), (64, 64, 64)],
    4: [(38, 38, 38, 38), (90, 1, 29, 30), (20, 70, 50, 40)],
}
"""Even, uneven with a rank of one row, and padded in the last rank."""
SOME_CUT = {2: (40, 110), 3: (1, 139, 10), 4: (20, 70, 50, 40)}
TWO = pytest.mark.parametrize("ranks", [2], indirect=True)
FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)
CUT_LEAVES = ("weight", "bias", "ref_weight", "ref_bias")


def rows_of(whole: Tensor, cut: tuple[int, ...], rank: int) -> Tensor:
    """This rank's rows of a weight or bias, as a leaf of its own."""
    padding = whole.new_full((sum(cut) - whole.shape[0], *whole.shape[1:]), torch.nan)
    own = torch.cat([whole.detach(), padding]).split(cut)[rank].clone()
    return own.requires_grad_(whole.requires_grad)


def part_of(given: Problem, cut: tuple[int, ...], rank: int) -> Problem:
    """A problem with this rank's rows of each head."""
    options = {
        name: rows_of(value, cut, rank) if name in CUT_LEAVES else value
        for name, value in given.options.items()
    }
    weight = rows_of(given.inputs[1], cut, rank)
    return Problem((given.inputs[0], weight, *given.inputs[2:]), options)


def all_ranks(size):
    """A group of its own: a group and a vocabulary belong to one cut."""
    return group_of(range(size))


def cut_loss(config, size, **knobs):
    return FusedLinearRatioKLLoss(config, tp_group=all_ranks(size), process_group="local", **knobs)


def results_on_ranks(rank, size, cases):
    """The result of each case (config, knobs, problem, cut)."""
    return [
        run(cut_loss(config, size, **knobs), part_of(given, cut, rank))
        for config, knobs, given, cut in cases
    ]


def put_together(of_ranks: list[Result], cut: tuple[int, ...], hidden_grad: str) -> list[Result]:
    """Each rank's result with the gradients of the whole weight and bias; padding gets zeros."""
    grads = {
        name: torch.cat([result.grads[name] for result in of_ranks])
        for name in of_ranks[0].grads
        if name != "hidden"
    }
    for gradient in grads.values():
        assert (gradient[V:] == 0).all()
    grads = {name: gradient[:V] for name, gradient in grads.items()}
    whole = []
    for result in of_ranks:
        hidden = result.grads["hidden"]
        if hidden_grad == "part":
            hidden = sum(each.grads["hidden"] for each in of_ranks)
        whole.append(
            Result(result.loss, result.metrics, result.outputs, {"hidden": hidden, **grads})
        )
    return whole


def assert_as_one_process(ranks, cases):
    """Each case is (config, knobs, problem, cut)."""
    of_ranks = ranks.run(results_on_ranks, cases)
    for (config, knobs, given, cut), *found in zip(cases, *of_ranks, strict=True):
        knobs = {name: value for name, value in knobs.items() if name != "tp_hidden_grad"}
        alone = run(FusedLinearRatioKLLoss(config, process_group="local", **knobs), given)
        for result in put_together(found, cut, cases[0][1].get("tp_hidden_grad", "whole")):
            assert_same(result, alone, FLOAT64_TOLERANCE)
        for result in found[1:]:
            assert torch.equal(result.outputs["logps"], found[0].outputs["logps"])
            assert torch.equal(result.outputs["entropies"], found[0].outputs["entropies"])


MODIFIERS = [
    ({}, {}),
    ({"logit_scale": 0.7, "softcap": 5.0}, {"bias": True}),
    ({"temperature": 0.8, "softcap": 5.0}, {"bias": True, "temperature": "token"}),
]


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_equals_the_whole_head(ranks, grads):
    """Bias, modifiers and a temperature a token; entropy mask and bonus; a scored reference."""
    cases = []
    for seed, (options, inputs) in enumerate(MODIFIERS):
        for loss_type, q in (("grpo", 0.5), ("dapo", 1.0)):
            config = RatioKLConfig(
                loss_type=loss_type,
                beta=0.04,
                vocab_size=V,
                top_entropy_quantile=q,
                entropy_coef=0.1,
                **options,
            )
            given = problem(seed, config, V=V, reference="hidden", **inputs)
            for cut in CUTS[ranks.size]:
                cases.append((config, {"grads": grads}, given, cut))
    assert_as_one_process(ranks, cases)


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_each_rank_may_keep_its_part_of_the_hidden_gradient(ranks, grads):
    config = RatioKLConfig(vocab_size=V, entropy_coef=0.1)
    given = problem(0, config, V=V, reference="none", bias=True)
    knobs = {"grads": grads, "tp_hidden_grad": "part"}
    assert_as_one_process(ranks, [(config, knobs, given, cut) for cut in CUTS[ranks.size]])


def test_small_tiles_and_rows_that_outnumber_columns(ranks):
    """The gradient of hidden is complete where the last tile of either order of walking ends."""
    cases = []
    for B, T in ((3, 10), (6, 40)):
        config = RatioKLConfig(vocab_size=V)
        given = problem(B, config, B=B, T=T, V=V, reference="none", bias=True)
        cases.append((config, {"chunk_bytes": 1}, given, SOME_CUT[ranks.size]))
    assert_as_one_process(ranks, cases)


@quiet_numpy()
def owned_on_ranks(rank, size, cut, hidden, weight, ids, backend):
    """Scores and gradients where every action lies on one rank."""
    own = rows_of(weight, cut, rank)
    hidden = hidden.detach().requires_grad_()
    scores = linear_logprob(
        hidden,
        own,
        ids,
        vocab_size=weight.shape[0],
        return_entropy=True,
        backend=backend,
        tp_group=all_ranks(size),
    )
    loss = (scores.logps + 0.1 * scores.entropies).sum()
    return *scores[:2], *torch.autograd.grad(loss, (hidden, own))


def statistics_on_ranks(rank, size, cut, hidden, weight, ids, mask, backend):
    with quiet_numpy():
        return linear_logprob(
            hidden,
            rows_of(weight, cut, rank),
            ids,
            mask,
            vocab_size=V,
            return_statistics=True,
            backend=backend,
            tp_group=all_ranks(size),
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics(ranks, backend):
    """Every third action is the most probable token; two rows have it twice, on two ranks."""
    cut = SOME_CUT[ranks.size]
    dtype = torch.float64 if backend == "torch" else torch.float32
    hidden, weight = torch.randn(33, 8, dtype=dtype), torch.randn(V, 8, dtype=dtype)
    weight[V - 1] = weight[0] = 4 * hidden[0]
    ids = torch.randint(V, (33,))
    ids[::3] = (hidden @ weight.T).argmax(-1)[::3]
    ids[0], mask = V - 1, torch.arange(33) % 5 != 4
    tolerance = FLOAT64_TOLERANCE if backend == "torch" else 2e-5
    whole = linear_logprob(hidden, weight, ids, mask, return_statistics=True, backend="torch")
    assert whole.is_top1[3]
    assert not whole.is_top1[0]
    for found in ranks.run(statistics_on_ranks, cut, hidden, weight, ids, mask, backend):
        for name in ("logps", "log_sum_sq_probs", "mean_logits"):
            assert_close(getattr(found, name), getattr(whole, name), tolerance, name)
        assert torch.equal(found.is_top1, whole.is_top1)


def whole_scores(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """logps, entropies and the two gradients by full logits in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (hidden @ weight.T).log_softmax(-1)
    logps = log_p.gather(-1, ids[..., None].long())[..., 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    loss = (logps + 0.1 * entropies).sum()
    return logps.detach(), entropies.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("torch", torch.float64, FLOAT64_TOLERANCE),
        pytest.param("triton", torch.float32, 2e-5, marks=pytest.mark.interpreter),
    ],
    ids=["torch", "triton"],
)
def test_a36_every_action_on_any_one_rank(ranks, backend, dtype, tolerance):
    """Gradients zero or wrong on ranks that do not hold the action (modelscope/ms-swift#9947)."""
    hidden, weight = torch.randn(33, 8, dtype=dtype), torch.randn(V, 8, dtype=dtype)
    weight.requires_grad_()
    cut = SOME_CUT[ranks.size]
    edges = [0, *accumulate(cut)]
    for first, last in pairwise(edges):
        ids = torch.randint(first, min(last, V), (33,))
        expected = whole_scores(hidden, weight, ids)
        of_ranks = ranks.run(owned_on_ranks, cut, hidden, weight, ids, backend)
        whole_weight = torch.cat([found[3] for found in of_ranks])[:V]
        assert_close(whole_weight, expected[3], tolerance, "weight.grad")
        for *found, _ in of_ranks:
            for got, wanted, what in zip(
                found, expected, ("logps", "entropies", "hidden.grad"), strict=False
            ):
                assert_close(got, wanted, tolerance, what)


@TWO
@pytest.mark.parametrize("ids_dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ids_of_any_integer_dtype(ranks, ids_dtype):
    """Shifted by a rank's first row they would leave a small dtype."""
    hidden = torch.randn(20, 4, dtype=torch.float64)
    weight = torch.randn(120, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(120, (20,)).to(ids_dtype)
    expected = whole_scores(hidden, weight, ids)
    for logps, _, d_hidden, _ in ranks.run(owned_on_ranks, (50, 70), hidden, weight, ids, "torch"):
        assert_close(logps, expected[0], FLOAT64_TOLERANCE, "logps")
        assert_close(d_hidden, expected[2], FLOAT64_TOLERANCE, "hidden.grad")


@quiet_numpy()
def minus_infinite_on_ranks(rank, size, cut, hidden, weight, bias, ids, backend):
    own, own_bias = rows_of(weight, cut, rank), rows_of(bias, cut, rank)
    hidden = hidden.detach().requires_grad_()
    scores = linear_logprob(
        hidden,
        own,
        ids,
        bias=own_bias,
        vocab_size=V,
        return_entropy=True,
        backend=backend,
        tp_group=all_ranks(size),
    )
    (scores.logps.sum() + scores.entropies.sum()).backward()
    return *(score.detach() for score in scores[:2]), hidden.grad, own.grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a04_ranks_whose_logits_are_all_minus_infinity(ranks, backend):
    """The finite logit on any rank: exp(-inf - -inf) gave NaN (Dao-AILab/flash-attention#1930)."""
    hidden, weight = torch.randn(5, 4), torch.randn(V, 4, requires_grad=True)
    cut = SOME_CUT[ranks.size]
    for finite in (0, cut[0], V - 1):
        bias = torch.full((V,), -torch.inf)
        bias[finite] = 10.0
        ids = torch.tensor([finite, finite, finite, (finite + 1) % V, (finite + 77) % V])
        for logps, entropies, d_hidden, d_weight in ranks.run(
            minus_infinite_on_ranks, cut, hidden, weight, bias, ids, backend
        ):
            # Triton computes the action's logit twice, in two orders.
            assert logps[:3].abs().max() <= (2e-6 if backend == "triton" else 0)
            assert logps[3:].tolist() == [-torch.inf, -torch.inf]
            assert entropies.tolist() == 5 * [0.0]
            assert (d_hidden[:3] == 0).all()
            assert d_weight.isfinite().all()


def invalid_on_ranks(rank, size, cut, hidden, weight, ids, mask):
    own = rows_of(weight, cut, rank)
    hidden = hidden.detach().requires_grad_()
    scores = linear_logprob(
        hidden, own, ids, mask, vocab_size=V, return_entropy=True, tp_group=all_ranks(size)
    )
    (scores.logps.sum() + scores.entropies.sum()).backward()
    return *(score.detach() for score in scores[:2]), hidden.grad, own.grad


@TWO
def test_inactive_rows_are_isolated_and_active_ones_stay_visible(ranks):
    hidden = torch.randn(6, 4)
    weight = torch.randn(V, 4, requires_grad=True)
    hidden[1], hidden[2] = torch.nan, torch.inf
    ids = torch.tensor([3, -100, 2**31 - 1, 149, 5, 80])
    mask = torch.tensor([1, 0, 0, 1, 1, 1])
    for logps, entropies, d_hidden, d_weight in ranks.run(
        invalid_on_ranks, (40, 110), hidden, weight, ids, mask
    ):
        assert logps[1:3].tolist() == entropies[1:3].tolist() == [0.0, 0.0]
        assert (d_hidden[1:3] == 0).all()
        for values in (logps, d_hidden, d_weight):
            assert values.isfinite().all()
    hidden[4] = torch.nan
    for logps, entropies, d_hidden, _ in ranks.run(
        invalid_on_ranks, (40, 110), hidden, weight, ids, mask
    ):
        visible = torch.arange(6) == 4
        assert torch.equal(logps.isnan(), visible)
        assert torch.equal(entropies.isnan(), visible)
        assert torch.equal(d_hidden.isnan().all(1), visible)


# Values and heads that are wrong on one rank or on all


def error_on_ranks(rank, size, heads, vocab_size, ids, calls):
    """The error of each call, on every rank; and whether the ranks are still in step."""
    messages, group = [], all_ranks(size)
    for call in range(calls):
        try:
            linear_logprob(
                torch.ones(2, 4),
                heads[rank][call],
                ids,
                vocab_size=vocab_size,
                tp_group=group,
            )
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append(None)
    count = torch.ones(())
    dist.all_reduce(count)
    assert count.item() == size
    return messages


def heads_of(*rows_of_calls):
    """For each rank, its head in each call."""
    return [
        [torch.ones(rows, 4) for rows in of_rank] for of_rank in zip(*rows_of_calls, strict=True)
    ]


@pytest.mark.parametrize("padding", [0, 6])
def test_a_whole_head_is_an_error_on_every_rank(ranks, padding):
    """Not log(ranks) too little."""
    heads = heads_of(ranks.size * [30 + padding])
    for (message,) in ranks.run(error_on_ranks, heads, 30, torch.tensor([1, 2]), 1):
        assert "every rank holds the whole head" in message
        assert f"got {ranks.size * [30 + padding]} rows" in message


@TWO
@pytest.mark.parametrize(
    ("rows", "reason"),
    [((10, 19), "rows are missing"), ((20, 10), None), ((25, 5), None), ((25, 6), None),
     ((30, 5), "only the last rank's rows"), ((1, 58), None), ((10, 40), None)],
)  # fmt: skip
def test_row_counts(ranks, rows, reason):
    """30 rows, of which the last rank must hold at least one."""
    for (message,) in ranks.run(error_on_ranks, heads_of(rows), 30, torch.tensor([1, 2]), 1):
        assert (message is None) if reason is None else (reason in message)


@TWO
def test_another_number_of_rows_later_is_an_error(ranks):
    heads = heads_of((11, 21), (32, 32), (11, 21))
    for rank, messages in enumerate(ranks.run(error_on_ranks, heads, 32, torch.tensor([1, 2]), 3)):
        first, second, third = messages
        assert first is third is None
        assert f"{(11, 21)[rank]} on this rank; got 32" in second


@pytest.mark.parametrize("bad", [-1, 30, 2**40])
def test_a_bad_id_raises_on_every_rank_for_the_whole_vocabulary(ranks, bad):
    rows = [*(ranks.size - 1) * [5], 30 - (ranks.size - 1) * 5 + 4]
    for (message,) in ranks.run(error_on_ranks, heads_of(rows), 30, torch.tensor([bad, 29]), 1):
        assert "[0, 30) on active tokens; got 1 active token" in message


@TWO
def test_vocab_size_is_required(ranks):
    for (message,) in ranks.run(error_on_ranks, heads_of((5, 5)), None, torch.tensor([1, 2]), 1):
        assert "vocab_size must be given with tp_group" in message


def alone_on_ranks(rank, size):
    alone = [group_of([member]) for member in range(size)][rank]
    hidden, weight, ids = torch.ones(2, 4), torch.eye(5, 4), torch.tensor([1, 4])
    cut = linear_logprob(hidden, weight, ids, tp_group=alone).logps
    return torch.equal(cut, linear_logprob(hidden, weight, ids).logps)


@TWO
def test_a_group_of_one_rank_cuts_nothing(ranks):
    assert ranks.run(alone_on_ranks) == [True, True]


def construction_on_ranks(rank, size):
    world = dist.group.WORLD
    pairs = [group_of([0, 1]), group_of([0, 1])]
    messages = []
    for knobs in (
        {"tp_group": world},
        {"cp_group": world},
        {"tp_group": pairs[0], "process_group": pairs[1]},
        {"tp_group": pairs[0], "cp_group": pairs[1], "process_group": "local"},
        {"tp_group": "local", "process_group": "local"},
        {"cp_group": 3, "process_group": "local"},
        {"tp_group": world, "tp_hidden_grad": "none", "process_group": "local"},
    ):
        try:
            FusedLinearRatioKLLoss(**knobs)
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@TWO
def test_groups_are_checked_at_construction(ranks):
    for messages in ranks.run(construction_on_ranks):
        for message, start in zip(
            messages,
            (
                "ValueError: process_group must be named with tp_group",
                "ValueError: process_group must be named with cp_group",
                "ValueError: process_group and tp_group must have this rank alone in common",
                "ValueError: tp_group and cp_group must have this rank alone in common",
                "TypeError: tp_group must be None or a torch.distributed.ProcessGroup",
                "TypeError: cp_group must be None",
                "ValueError: tp_hidden_grad must be one of whole, part; got 'none'",
            ),
            strict=True,
        ):
            assert message.startswith(start)


def copies_on_ranks(rank, size):
    loss_fn = cut_loss(RatioKLConfig(vocab_size=V), size)
    copied = copy.deepcopy(torch.nn.ModuleList([loss_fn]))[0]
    return copied is not loss_fn, copied.runtime.tp_group is loss_fn.runtime.tp_group


@TWO
def test_a_copied_model_belongs_to_the_same_groups(ranks):
    """torch's process groups themselves cannot be copied."""
    assert ranks.run(copies_on_ranks) == 2 * [(True, True)]


# Ranks that train different things

FROZEN = {
    "hidden": [("weight",), ("hidden", "weight")],
    "everything": [(), ("hidden", "weight")],
    "everything but hidden": [("hidden",), ("weight",)],
    "all hiddens": [("weight",), ()],
    "all": [(), ()],
}


def frozen_on_ranks(rank, size, cases):
    found = []
    for given, cut, grads, trained in cases:
        part = part_of(given, cut, rank)
        mine = trained[min(rank, 1)]
        hidden = part.inputs[0].detach().requires_grad_("hidden" in mine)
        weight = part.inputs[1].detach().requires_grad_("weight" in mine)
        config = RatioKLConfig(vocab_size=V)
        loss_fn = cut_loss(config, size, grads=grads)
        out = loss_fn(hidden, weight, *part.inputs[2:], **part.options)
        out.loss.backward()
        found.append((out.loss.detach(), hidden.grad, weight.grad))
    count = torch.ones(())
    dist.all_reduce(count)
    assert count.item() == size
    return found


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_ranks_with_different_requires_grad_finish(ranks, grads):
    given = problem(1, RatioKLConfig(vocab_size=V), V=V, reference="none")
    cut = SOME_CUT[ranks.size]
    cases = [(given, cut, grads, trained) for trained in FROZEN.values()]
    of_ranks = ranks.run(frozen_on_ranks, cases)
    alone = run(FusedLinearRatioKLLoss(process_group="local", vocab_size=V), given)
    edges = [0, *accumulate(cut)]
    for rank, found in enumerate(of_ranks):
        for name, (loss, d_hidden, d_weight) in zip(FROZEN, found, strict=True):
            mine = FROZEN[name][min(rank, 1)]
            assert (d_hidden is not None) == ("hidden" in mine)
            assert (d_weight is not None) == ("weight" in mine)
            assert_close(loss, alone.loss, FLOAT64_TOLERANCE, name)
            if d_hidden is not None:
                assert_close(d_hidden, alone.grads["hidden"], FLOAT64_TOLERANCE, name)
            if d_weight is not None:
                wanted = alone.grads["weight"][edges[rank] : edges[rank + 1]]
                assert_close(d_weight[: len(wanted)], wanted, FLOAT64_TOLERANCE, name)


def ratio_kl_on_ranks(rank, size, given, cut):
    part = part_of(given, cut, rank)
    hidden, weight, ids, mask, _ = part.inputs
    names = ("old_logps", "ref_hidden", "ref_weight", "ref_bias", "bias")
    options = {name: part.options[name] for name in names}
    ratio, kl = linear_ratio_kl(
        hidden, weight, ids, mask, vocab_size=V, tp_group=all_ranks(size), **options
    )
    (d_hidden,) = torch.autograd.grad(ratio.sum() + kl.sum(), hidden)
    return ratio.detach(), kl.detach(), d_hidden


def test_linear_ratio_kl(ranks):
    given = problem(2, V=V, bias=True, reference="hidden")
    hidden, weight, ids, mask, _ = given.inputs
    ratio, kl = linear_ratio_kl(hidden, weight, ids, mask, vocab_size=V, **given.options)
    (d_hidden,) = torch.autograd.grad(ratio.sum() + kl.sum(), hidden)
    for found in ranks.run(ratio_kl_on_ranks, given, SOME_CUT[ranks.size]):
        for got, wanted, what in zip(
            found, (ratio, kl, d_hidden), ("ratio", "kl", "hidden.grad"), strict=True
        ):
            assert_close(got, wanted, FLOAT64_TOLERANCE, what)


# Beside data-parallel ranks


def mesh_on_ranks(rank, size, config, halves, cut):
    """Ranks (0, 1) and (2, 3) cut the head, ranks (0, 2) and (1, 3) hold other sequences."""
    tp = [group_of([0, 1]), group_of([2, 3])][rank // 2]
    dp = [group_of([0, 2]), group_of([1, 3])][rank % 2]
    loss_fn = FusedLinearRatioKLLoss(config, tp_group=tp, process_group=dp)
    found = run(loss_fn, part_of(halves[rank // 2], cut, rank % 2))
    loss, d_weight = found.loss.clone(), found.grads["weight"].clone()
    for value in (loss, d_weight):
        dist.all_reduce(value, group=dp)
    return loss / 2, d_weight / 2, found.grads["hidden"] / 2


@FOUR
def test_two_by_two_ranks(ranks):
    """Quantile and token count over the ranks with other sequences, the head over the others."""
    cut = (40, 110)
    for seed, q in enumerate((1.0, 0.5)):
        config = RatioKLConfig(vocab_size=V, top_entropy_quantile=q)
        given = problem(seed, config, V=V, reference="none")
        halves = []
        for rows in (slice(0, 2), slice(2, 6)):
            hidden, weight, *rest = given.inputs
            options = {name: value[rows] for name, value in given.options.items()}
            leaf = hidden.detach()[rows].requires_grad_()
            halves.append(Problem((leaf, weight, *(value[rows] for value in rest)), options))
        alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
        found = ranks.run(mesh_on_ranks, config, halves, cut)
        d_weight = torch.cat([found[0][1], found[1][1]])
        assert_close(d_weight, alone.grads["weight"], FLOAT64_TOLERANCE, "weight.grad")
        for rank, (loss, _, d_hidden) in enumerate(found):
            assert_close(loss, alone.loss, FLOAT64_TOLERANCE, "loss")
            wanted = alone.grads["hidden"][slice(0, 2) if rank < 2 else slice(2, 6)]
            assert_close(d_hidden, wanted, FLOAT64_TOLERANCE, "hidden.grad")


# torch.compile and the Triton backend


def compiled_on_ranks(rank, size, cases, cut):
    """Results of each case, eager and compiled."""
    found = []
    for config, given in cases:
        loss_fn, part = cut_loss(config, size), part_of(given, cut, rank)
        compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
        found.append((run(loss_fn, part), run(compiled, part)))
        torch._dynamo.reset()
    return found


@TWO
def test_compiles_in_one_graph(ranks):
    cases = []
    for loss_type, q in (("dapo", 0.5), ("grpo", 1.0)):
        config = RatioKLConfig(
            loss_type=loss_type, vocab_size=V, beta=0.04, top_entropy_quantile=q, softcap=5.0
        )
        given = problem(0, config, V=V, bias=True, reference="hidden", temperature="token")
        cases.append((config, given))
    for of_rank in ranks.run(compiled_on_ranks, cases, (40, 116)):
        for eager, compiled in of_rank:
            assert_same(compiled, eager, FLOAT64_TOLERANCE)


def compiled_frozen_on_ranks(rank, size, given, cut):
    compiled = torch.compile(
        cut_loss(RatioKLConfig(vocab_size=V), size), fullgraph=True, backend="aot_eager"
    )
    part = part_of(given, cut, rank)
    hidden, weight, *rest = (value.detach() for value in part.inputs)
    hidden.requires_grad_(rank == 0)
    compiled(hidden, weight, *rest, **part.options).loss.backward()
    torch._dynamo.reset()
    return hidden.grad


@TWO
def test_compiled_where_one_rank_trains_nothing(ranks):
    given = problem(1, RatioKLConfig(vocab_size=V), V=V, reference="none")
    first, second = ranks.run(compiled_frozen_on_ranks, given, (40, 110))
    alone = run(FusedLinearRatioKLLoss(process_group="local", vocab_size=V), given)
    assert_close(first, alone.grads["hidden"], FLOAT64_TOLERANCE, "hidden.grad")
    assert second is None


def checked_operators_on_ranks(rank, size):
    """torch's own checks of the operators: schema, fakes, autograd, aot dispatch."""
    group, weight = all_ranks(size), torch.randn(15, 4, requires_grad=True)
    hidden = torch.randn(5, 4, requires_grad=True)
    ids, mask = torch.randint(30, (5,)), torch.tensor([True, True, False, True, True])
    for wanted in (False, True):
        knobs = (wanted, wanted, "torch", 2**20, "later", group.group_name, size, True, True)
        arguments = (hidden, weight, None, None, ids, mask, None, None, None, 30, torch.float32)
        operator = torch.ops.ratio_kl.sharded_scores.default
        torch.library.opcheck(operator, (*arguments, *knobs))
    return True


@TWO
def test_the_operator_passes_torchs_checks(ranks):
    torch.manual_seed(0)
    assert ranks.run(checked_operators_on_ranks) == [True, True]


@quiet_numpy()
def triton_results_on_ranks(rank, size, cases):
    return results_on_ranks(rank, size, cases)


@TWO
@pytest.mark.interpreter
@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_triton_with_rows_left_out(ranks, dtype, tolerance, chunk_bytes):
    """Inactive rows, zero coefficients, one block and many: against Triton on one rank, whose
    gradients are rounded at other places."""
    config = RatioKLConfig(vocab_size=V, softcap=20.0)
    given = problem(6, config, B=4, T=12, V=V, reference="none", bias=True, dtype=dtype)
    cut, knobs = (40, 116), {"backend": "triton", "chunk_bytes": chunk_bytes}
    found = ranks.run(triton_results_on_ranks, [(config, knobs, given, cut)])
    with quiet_numpy():
        alone = run(FusedLinearRatioKLLoss(config, process_group="local", **knobs), given)
    assert (alone.grads["hidden"].flatten(0, 1) == 0).all(1).any()
    for result in put_together([each[0] for each in found], cut, "whole"):
        assert_close(result.outputs["logps"], alone.outputs["logps"], 1e-5, "logps")
        for leaf, wanted in alone.grads.items():
            assert relative_error(result.grads[leaf], wanted) <= tolerance, leaf
            assert result.grads[leaf].dtype == wanted.dtype


@quiet_numpy()
def invariance_on_ranks(rank, size, hidden, weight, ids, cut, batches):
    """Scores of each batch of rows by Triton."""
    own, group = rows_of(weight, cut, rank), all_ranks(size)
    found = []
    for rows, mask in batches:
        with torch.no_grad():
            found.append(
                linear_logprob(
                    hidden[rows],
                    own,
                    ids[rows],
                    mask,
                    vocab_size=V,
                    return_entropy=True,
                    backend="triton",
                    tp_group=group,
                )
            )
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_a48_a_row_is_bitwise_the_same_in_any_batch(ranks):
    """Alone, in any N, order and mask, at a fixed number of ranks (RL-Kernel#329, trl#4303).

    33 rows are one tile and a row of the next.
    """
    hidden, weight = torch.randn(33, 8), 3 * torch.randn(V, 8)
    ids = torch.randint(V, (33,))
    every_other = torch.arange(33) % 2 == 0
    batches = [
        (torch.arange(33), None),
        (torch.arange(33), every_other),
        (torch.arange(17).flip(0), None),
        *((torch.tensor([row]), None) for row in (0, 32)),
    ]
    of_ranks = ranks.run(invariance_on_ranks, hidden, weight, ids, SOME_CUT[ranks.size], batches)
    expected = whole_scores(hidden, weight, ids)
    for found in of_ranks:
        whole = found[0]
        assert_close(whole.logps, expected[0].float(), 2e-5, "logps")
        for (rows, mask), scores in zip(batches, found, strict=True):
            active = torch.ones(len(rows), dtype=torch.bool) if mask is None else mask
            for got, wanted in zip(scores[:2], whole[:2], strict=True):
                assert torch.equal(got, torch.where(active, wanted[rows], 0))


# What a call sends


def sent_on_ranks(rank, size, given, cut, knobs):
    part = part_of(given, cut, rank)
    loss_fn = cut_loss(RatioKLConfig(vocab_size=V), size, **knobs)
    with recorded_collectives() as first:
        loss_fn(*part.inputs, **part.options)
    with recorded_collectives() as forward:
        loss = loss_fn(*part.inputs, **part.options).loss
    with recorded_collectives() as backward:
        loss.backward()
    return first, forward, backward


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_what_a_call_sends(ranks, grads):
    """The table of docs/distributed.md; the row counts at the first call alone."""
    given = problem(1, RatioKLConfig(vocab_size=V), V=V, reference="none")
    N, H = given.inputs[2].numel(), given.hidden.shape[-1]
    counts = [("all_gather_into_tensor", (), "torch.int64")]
    scores = [("all_gather_into_tensor", (4 * N + 1,), "torch.float64")]
    for hidden_grad in ("whole", "part"):
        gradient = [("all_reduce_", (N, H), "torch.float64")] if hidden_grad == "whole" else []
        in_forward, in_backward = (gradient, []) if grads == "forward" else ([], gradient)
        knobs = {"grads": grads, "tp_hidden_grad": hidden_grad}
        for first, forward, backward in ranks.run(
            sent_on_ranks, given, SOME_CUT[ranks.size], knobs
        ):
            assert [first[0][0], first[0][2]] == [counts[0][0], counts[0][2]]
            assert first[1:] == forward == scores + in_forward
            assert backward == in_backward


def shapes_on_ranks(rank, size, given, cut):
    """Own rows, and the shape of every tensor that a call and its backward allocated."""
    part = part_of(given, cut, rank)
    loss_fn = cut_loss(RatioKLConfig(vocab_size=1600), size, chunk_bytes=2**14)
    with metered() as meter:
        run(loss_fn, part)
    return meter.shapes


def test_no_second_copy_of_the_weights_gradient(ranks):
    """Only the gradient of hidden is kept in float32 for the sum over ranks."""
    config = RatioKLConfig(vocab_size=1600)
    given = problem(0, config, B=2, T=16, V=1600, reference="none", dtype=torch.bfloat16)
    cut = (*(ranks.size - 1) * [300], 1600 - 300 * (ranks.size - 1))
    for rows, shapes in zip(cut, ranks.run(shapes_on_ranks, given, cut), strict=True):
        assert shapes.count((rows, 8)) == 1, "the gradient itself, and nothing beside"


# DTensor


def dtensor_on_ranks(rank, size, given):
    mesh = init_device_mesh("cpu", (size,))
    hidden, weight, *rest = given.inputs
    heads = {"weight": weight, **{name: given.options[name] for name in CUT_LEAVES[1:]}}
    cut = {
        name: distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        for name, whole in heads.items()
    }
    loss_fn = FusedLinearRatioKLLoss(
        RatioKLConfig(beta=0.04), tp_group=mesh.get_group(), process_group="local"
    )
    options = given.options | {name: cut[name] for name in CUT_LEAVES[1:]}
    out = loss_fn(hidden, cut["weight"], *rest, **options)
    out.loss.backward()
    gradients = [cut["weight"].grad, cut["bias"].grad]
    placements = [gradient.placements == (Shard(0),) for gradient in gradients]
    return out.loss.detach(), hidden.grad, *(g.full_tensor() for g in gradients), placements


def test_a_dtensor_cut_by_rows_is_the_head(ranks):
    """vocab_size is its number of rows, and its gradient one of the same placement."""
    config = RatioKLConfig(beta=0.04)
    given = problem(4, config, V=V, bias=True, reference="hidden")
    alone = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
    for loss, d_hidden, d_weight, d_bias, placements in ranks.run(dtensor_on_ranks, given):
        assert_close(loss, alone.loss, FLOAT64_TOLERANCE, "loss")
        for name, gradient in {"hidden": d_hidden, "weight": d_weight, "bias": d_bias}.items():
            assert_close(gradient, alone.grads[name], FLOAT64_TOLERANCE, f"{name}.grad")
        assert placements == [True, True]


def refused_dtensors_on_ranks(rank, size):
    mesh, other = init_device_mesh("cpu", (size,)), all_ranks(size)
    hidden, ids = torch.ones(2, 4), torch.tensor([1, 2])
    by_rows = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    messages = []
    for given_hidden, weight, group in (
        (hidden, distribute_tensor(torch.ones(8, 4), mesh, [Replicate()]), mesh.get_group()),
        (hidden, distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)]), mesh.get_group()),
        (hidden, by_rows, other),
        (hidden, by_rows, None),
        (distribute_tensor(hidden, mesh, [Shard(0)]), torch.ones(8, 4), mesh.get_group()),
    ):
        try:
            linear_logprob(given_hidden, weight, ids, tp_group=group)
        except ValueError as error:
            messages.append(str(error))
    return messages


@TWO
def test_other_dtensors_are_refused(ranks):
    for messages in ranks.run(refused_dtensors_on_ranks):
        names = 4 * ["weight"] + ["hidden"]
        for name, message in zip(names, messages, strict=True):
            assert message.startswith(f"{name} is a DTensor with placements")

"""A head cut by rows over ranks: equal to the whole head on one rank.

Everything is float64 unless it says otherwise.
"""

from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from distributed.cuts import (
    CUTS,
    FOUR,
    SOME_CUT,
    TWO,
    V,
    all_ranks,
    assert_as_one_process,
    part_of,
    rows_of,
    whole_scores,
)
from distributed.groups import group_of, quiet_numpy
from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig, linear_logprob, linear_ratio_kl
from support import BACKENDS, FLOAT64_TOLERANCE, Problem, assert_close, problem, run

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

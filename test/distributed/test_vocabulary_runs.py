"""A head cut by rows over ranks: how it runs. Frozen parts, one graph, Triton, traffic, memory."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from cases.meter import metered
from distributed.cuts import (
    SOME_CUT,
    TWO,
    V,
    all_ranks,
    cut_loss,
    part_of,
    put_together,
    results_on_ranks,
    rows_of,
    whole_scores,
)
from distributed.groups import quiet_numpy, recorded_collectives
from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig, linear_logprob
from support import FLOAT64_TOLERANCE, assert_close, assert_same, problem, relative_error, run

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

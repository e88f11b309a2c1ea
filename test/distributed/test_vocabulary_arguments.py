"""A head cut by rows over ranks: what heads, groups and ids are refused, on every rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distributed.cuts import CUT_LEAVES, TWO, V, all_ranks, cut_loss
from distributed.groups import group_of
from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig, linear_logprob
from support import FLOAT64_TOLERANCE, assert_close, problem, run


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

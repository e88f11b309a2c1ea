"""A head cut by rows over ranks: the cuts, each rank's part of a problem, and the parts as one."""

import pytest
import torch
from torch import Tensor

from distributed.groups import group_of
from ratio_kl import FusedLinearRatioKLLoss
from support import FLOAT64_TOLERANCE, Problem, Result, assert_same, run

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


def whole_scores(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """logps, entropies and the two gradients by full logits in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = (hidden @ weight.T).log_softmax(-1)
    logps = log_p.gather(-1, ids[..., None].long())[..., 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    loss = (logps + 0.1 * entropies).sum()
    return logps.detach(), entropies.detach(), *torch.autograd.grad(loss, (hidden, weight))

"""ratio_kl: the loss module, its primitive, and its operator on logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob, ratio_kl
from ratio_kl.ops.contract import DEFAULT_CHUNK_BYTES

from .. import passes
from ..logits_problem import LogitsProblem
from ..policy_loss import EPSILON
from ..problem import Problem
from . import Outcome

CPU_CHUNK_BYTES = 32 * 2**20
"""The default budget would hold all logits of the small sizes that a CPU is given."""


def chunk_bytes(device: torch.device) -> int:
    """Budget of the temporaries: the library's default, or less on a CPU."""
    return CPU_CHUNK_BYTES if device.type == "cpu" else DEFAULT_CHUNK_BYTES


def load(job: str) -> Callable[[Any], Any]:
    calls: dict[str, Callable[[Any], Any]] = {
        "loss": loss,
        "forward": forward,
        "logits": on_logits,
        "pass_one": passes.alone(passes.pass_one),
        "pass_two": passes.alone(passes.pass_two),
    }
    return calls[job]


def loss(problem: Problem) -> Outcome:
    loss_fn = FusedLinearRatioKLLoss(
        loss_type="dapo",
        epsilon_low=EPSILON,
        top_entropy_quantile=problem.quantile,
        chunk_bytes=chunk_bytes(problem.hidden.device),
        process_group="local",
    )
    out = loss_fn(
        problem.hidden, problem.weight, problem.action_ids, problem.mask, problem.advantages
    )
    return Outcome(out.logps, out.entropies, out.loss)


def forward(problem: Problem) -> Outcome:
    out = linear_logprob(
        problem.hidden,
        problem.weight,
        problem.action_ids,
        problem.mask if problem.masked else None,
        return_entropy=problem.with_entropy,
        chunk_bytes=chunk_bytes(problem.hidden.device),
    )
    return Outcome(out.logps, out.entropies if problem.with_entropy else None)


def on_logits(problem: LogitsProblem) -> tuple[Tensor, Tensor]:
    return ratio_kl(
        problem.policy, problem.reference, problem.action_ids, problem.mask, problem.old_logps
    )

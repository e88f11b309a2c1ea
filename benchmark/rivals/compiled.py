"""Full logits through torch.compile, each shape compiled for itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..logits_problem import LogitsProblem
from ..problem import Problem
from . import Outcome, eager

VARIANTS = 256
"""Past this many shapes the compiler would go back to eager execution without a word."""


def load(job: str) -> Callable[[Any], Any]:
    calls: dict[str, Callable[[Any], Any]] = {
        "loss": full_logits,
        "forward": full_logits,
        "logits": on_logits,
    }
    return calls[job]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = VARIANTS
    return torch.compile(function, dynamic=False)


def full_logits(problem: Problem) -> Outcome:
    call = _compiled(eager.log_probabilities)
    logps, entropies = call(
        problem.hidden, problem.weight, problem.action_ids, problem.needs_entropy
    )
    return Outcome(logps, entropies)


def on_logits(problem: LogitsProblem) -> tuple[Tensor, Tensor]:
    ratio, kl = _compiled(eager.ratio_kl_of_logits)(
        problem.policy, problem.reference, problem.action_ids, problem.mask, problem.old_logps
    )
    return ratio, kl

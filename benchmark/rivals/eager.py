"""Full logits: what a trainer computes that has no fused head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..logits_problem import LogitsProblem
from ..problem import Problem
from . import Outcome


def load(job: str) -> Callable[[Any], Any]:
    calls: dict[str, Callable[[Any], Any]] = {
        "loss": full_logits,
        "forward": full_logits,
        "logits": on_logits,
    }
    return calls[job]


def full_logits(problem: Problem) -> Outcome:
    logps, entropies = log_probabilities(
        problem.hidden, problem.weight, problem.action_ids, problem.needs_entropy
    )
    return Outcome(logps, entropies)


def log_probabilities(
    hidden: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [B, T], and entropies without gradient."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    lse = logits.logsumexp(-1)
    logps = logits.gather(-1, ids[..., None])[..., 0] - lse
    if not with_entropy:
        return logps, None
    with torch.no_grad():
        entropies = lse - (logits.softmax(-1) * logits).sum(-1)
    return logps, entropies


def on_logits(problem: LogitsProblem) -> tuple[Tensor, Tensor]:
    return ratio_kl_of_logits(
        problem.policy, problem.reference, problem.action_ids, problem.mask, problem.old_logps
    )


def ratio_kl_of_logits(
    policy: Tensor, reference: Tensor, ids: Tensor, mask: Tensor, old_logps: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(logp - old) and exp(d) - d - 1, d = ref - logp, through two float32 log-softmaxes."""
    logps, ref_logps = (
        logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        for logits in (policy, reference)
    )
    ratio = torch.where(mask, logps - old_logps, 0).exp()
    delta = torch.where(mask, ref_logps - logps, 0)
    return ratio, delta.exp() - delta - 1

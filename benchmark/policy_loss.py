"""The policy loss around a rival's log-probabilities: DAPO's, at the first update of a rollout."""

import torch
from torch import Tensor

from .problem import Problem

EPSILON = 0.2


def kept_tokens(problem: Problem, entropies: Tensor | None) -> Tensor:
    """[B, T] bool: active tokens of high entropy, or all active ones."""
    if problem.quantile == 1:
        return problem.mask
    assert entropies is not None
    wide = torch.promote_types(entropies.dtype, torch.float32)
    entropies = entropies.detach().to(wide)
    threshold = torch.quantile(entropies[problem.mask], 1 - problem.quantile)
    return problem.mask & (entropies >= threshold)


def policy_loss(problem: Problem, logps: Tensor, entropies: Tensor | None) -> Tensor:
    """Clipped policy loss over the mean active token; old log-probabilities are the present ones.

        sum_kept -min(r A, clamp(r, 0.8, 1.2) A) / active,   r = exp(logp - sg(logp))

    Reference: Yu et al. 2025, DAPO, arXiv 2503.14476.
    """
    ratio = (logps - logps.detach()).exp()
    A = problem.advantages[:, None]
    term = -torch.minimum(ratio * A, ratio.clamp(1 - EPSILON, 1 + EPSILON) * A)
    kept = kept_tokens(problem, entropies)
    return torch.where(kept, term, 0).sum() / problem.mask.sum().clamp(min=1)


def coefficients(problem: Problem, entropies: Tensor) -> Tensor:
    """[B, T] derivative of `policy_loss` by each log-probability, in float64."""
    kept = kept_tokens(problem, entropies)
    slope = -problem.advantages.double()[:, None] / problem.mask.sum().clamp(min=1)
    return torch.where(kept, slope, 0)

"""Policy terms, one value a token: elementwise, never reduced, knowing no mask and no vocabulary.

A new variant is one function here, one row in POLICIES, one in PRESETS, its long-hand twin in
reference.py and a test with numbers worked out by hand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import RatioKLConfig
from .bounds import clamped, in_range


def beyond(bounds: tuple[float, float], ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens whose ratio is below the lower bound and A < 0; those above the upper and A > 0."""
    low, high = bounds
    return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def clip(
    ratio: Tensor,
    advantages: Tensor,
    beyond: tuple[Tensor, Tensor],
    bounds: tuple[float, float],
    delta: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate: -min(min(r, delta) A, clamp(r, low, high) A).

    The gradient passes at the exact bound. delta >= high is the dual clip.
    Reference: Schulman et al. 2017 (arXiv 1707.06347); delta: INTELLECT-2 (arXiv 2505.07291).
    """
    if delta is not None:
        capped = clamped(ratio, high=delta)
        return -torch.minimum(capped * advantages, clamped(ratio, *bounds) * advantages)
    # Without delta the minimum takes the bound just where the tokens are beyond it: half the work.
    for tokens, bound in zip(beyond, bounds, strict=True):
        ratio = torch.where(tokens, in_range(bound, ratio.dtype), ratio)
    return -ratio * advantages


def cispo(ratio: Tensor, advantages: Tensor, logps: Tensor, *, epsilon_high: float) -> Tensor:
    """-sg(min(r, epsilon_high)) A logp: the weight is clipped, the gradient never.

    Reference: MiniMax-M1 (arXiv 2506.13585).
    """
    weight = ratio.detach().clamp(max=in_range(epsilon_high, ratio.dtype))
    return -weight * advantages * logps


def sapo(
    ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float
) -> Tensor:
    """-sigmoid(tau (r - 1)) (4 / tau) A with tau by the sign of A: a soft gate for the clip.

    Written as (sigmoid(tau (1 - r)) - 1) (4 / tau) A, whose gradient keeps its digits at large r.
    Reference: Soft Adaptive Policy Optimization (arXiv 2511.20347).
    """
    tau = _choose(advantages > 0, temperature_pos, temperature_neg, ratio.dtype)
    return (torch.sigmoid(tau * (1 - ratio)) - 1) * (4 * advantages / tau)


def vespo(phi: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    """-phi A logp, phi (vespo_phi) being a constant.

    Reference: Variational Sequence-level Soft Policy Optimization (arXiv 2602.10693).
    """
    return -phi * advantages * logps


VESPO_LOG_RANGE = (math.log(1e-8), 20.0)
"""Range of the logarithm of vespo's sequence weight, and of each sampling ratio in it."""


def vespo_phi(
    log_weight: Tensor,
    advantages: Tensor,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Tensor:
    """exp(lambda + k log w - lambda w), detached; (k, lambda) by the sign of A, nan and inf 0."""
    lambda_pos, lambda_neg = max(lambda_pos, 1e-4), max(lambda_neg, 1e-4)
    log_weight = log_weight.detach().clamp(*VESPO_LOG_RANGE)
    positive = advantages >= 0
    k = _choose(positive, k_pos, k_neg, log_weight.dtype)
    rate = _choose(positive, lambda_pos, lambda_neg, log_weight.dtype)
    phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
    return torch.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0)


def _choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """torch.where over two numbers, not rounded to torch's default dtype on the way."""
    zeros = torch.zeros_like(condition, dtype=dtype)
    return torch.where(condition, zeros + yes, zeros + no)


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy term may look at; tensors have one entry a token."""

    ratio: Tensor
    logps: Tensor
    advantages: Tensor
    beyond: tuple[Tensor, Tensor]
    """bool: ratio below the policy's lower bound and A < 0; above the upper one and A > 0."""
    log_sequence_weight: Tensor | None
    """Summed log-ratio of the token's sequence, with the sampling ratio: vespo's log w. None for
    policies without phi."""


@dataclass(frozen=True)
class Policy:
    """A policy term and what goes with it."""

    term: Callable[[PolicyTerms, RatioKLConfig], Tensor]
    bounds: Callable[[RatioKLConfig], tuple[float, float]] = lambda config: (-math.inf, math.inf)
    """Ratios below the first (A < 0) or above the second (A > 0) count as clipped."""
    phi: Callable[[PolicyTerms, RatioKLConfig], Tensor] | None = None
    """A constant weight inside the term that the caller is told of."""
    folds_in_sampling_ratio: bool = False
    """The term uses the sampling ratio itself, so it is not multiplied in again."""


def _vespo_phi(terms: PolicyTerms, config: RatioKLConfig) -> Tensor:
    assert terms.log_sequence_weight is not None
    return vespo_phi(
        terms.log_sequence_weight,
        terms.advantages,
        k_pos=config.vespo_k_pos,
        lambda_pos=config.vespo_lambda_pos,
        k_neg=config.vespo_k_neg,
        lambda_neg=config.vespo_lambda_neg,
    )


def _clip_bounds(config: RatioKLConfig) -> tuple[float, float]:
    return 1 - config.epsilon_low, 1 + config.upper_epsilon


POLICIES = {
    "clip": Policy(
        term=lambda t, c: clip(t.ratio, t.advantages, t.beyond, _clip_bounds(c), c.delta),
        bounds=_clip_bounds,
    ),
    "cispo": Policy(
        term=lambda t, c: cispo(t.ratio, t.advantages, t.logps, epsilon_high=c.upper_epsilon),
        bounds=lambda c: (-math.inf, c.upper_epsilon),
    ),
    "sapo": Policy(
        term=lambda t, c: sapo(
            t.ratio,
            t.advantages,
            temperature_pos=c.sapo_temperature_pos,
            temperature_neg=c.sapo_temperature_neg,
        ),
    ),
    "vespo": Policy(
        term=lambda t, c: vespo(_vespo_phi(t, c), t.advantages, t.logps),
        phi=_vespo_phi,
        folds_in_sampling_ratio=True,
    ),
}

PRESETS = {
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "token_mean"),
    "dr_grpo": ("clip", "constant_length"),
    "dapo": ("clip", "global_token_mean"),
    "cispo": ("cispo", "global_token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "global_token_mean"),
    "luspo": ("clip", "sequence_sum"),
}
"""loss_type -> (policy term, reduction)."""

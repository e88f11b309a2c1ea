"""Importance ratios of the three levels."""

import torch
from torch import Tensor

from .sequences import Layout


def masked_difference(minuend: Tensor, subtrahend: Tensor, mask: Tensor) -> Tensor:
    """minuend - subtrahend on active tokens and 0 elsewhere, selected before it is used."""
    return torch.where(mask, minuend - subtrahend, 0)


def token_level(log_ratio: Tensor, logps: Tensor, active: Tensor, layout: Layout) -> Tensor:
    """PPO: each token has its own ratio (Schulman et al. 2017, arXiv 1707.06347)."""
    return log_ratio


def sequence_level(log_ratio: Tensor, logps: Tensor, active: Tensor, layout: Layout) -> Tensor:
    """GSPO: the mean log-ratio of the sequence (Zheng et al. 2025, arXiv 2507.18071)."""
    return layout.spread(layout.sum(log_ratio)) / active


def sequence_token_level(
    log_ratio: Tensor, logps: Tensor, active: Tensor, layout: Layout
) -> Tensor:
    """GSPO-token: the sequence's value with each token's own gradient (arXiv 2507.18071)."""
    mean = sequence_level(log_ratio, logps, active, layout)
    return mean.detach() + (logps - logps.detach())


LEVELS = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
}
"""level -> function (log_ratio, logps, active, layout) -> log weight, one entry a token; `active` is
the number of active tokens of each token's sequence, at least 1."""


def bounded_exp(log_weight: Tensor, limit: float | None) -> Tensor:
    """exp, of the input clamped to +-limit: finite, with gradient 0 beyond."""
    return (log_weight if limit is None else log_weight.clamp(-limit, limit)).exp()

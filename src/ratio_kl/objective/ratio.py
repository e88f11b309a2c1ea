"""Importance ratios of the loss, at three levels."""

import torch
from torch import Tensor

from .bounds import bounded
from .sequences import Layout


def masked_difference(minuend: Tensor, subtrahend: Tensor, mask: Tensor) -> Tensor:
    """minuend - subtrahend on active tokens and 0 elsewhere, selected before it is used."""
    return torch.where(mask, minuend - subtrahend, 0)


def token_level(
    log_ratio: Tensor, logps: Tensor, mask: Tensor, active: Tensor, layout: Layout
) -> Tensor:
    """PPO: each token has its own ratio (Schulman et al. 2017, arXiv 1707.06347)."""
    return log_ratio


def sequence_level(
    log_ratio: Tensor, logps: Tensor, mask: Tensor, active: Tensor, layout: Layout
) -> Tensor:
    """GSPO: the mean log-ratio of the sequence (Zheng et al. 2025, arXiv 2507.18071)."""
    return torch.where(mask, layout.spread(layout.sum(log_ratio)) / active, 0)


def sequence_token_level(
    log_ratio: Tensor, logps: Tensor, mask: Tensor, active: Tensor, layout: Layout
) -> Tensor:
    """GSPO-token: the sequence's value with each token's own gradient (arXiv 2507.18071)."""
    mean = sequence_level(log_ratio, logps, mask, active, layout)
    return mean.detach() + (logps - logps.detach())


LEVELS = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
}
"""level -> function (log_ratio, logps, mask, active, layout) -> log weight, one entry a token, 0 on
inactive ones, where log_ratio and logps are 0; `active` is the number of active tokens of each
token's sequence, at least 1."""


LARGEST_EXPONENT = 88.0
"""exp of it is finite in float32."""


def bounded_exp(log_weight: Tensor, limit: float | None) -> Tensor:
    """exp, of the input clamped to +-limit: finite, with gradient 0 beyond."""
    if limit is not None and limit <= LARGEST_EXPONENT:
        return bounded(log_weight, limit).exp()
    return _OverflowingExp.apply(bounded(log_weight, limit))


class _OverflowingExp(torch.autograd.Function):
    """exp that may be inf, and passes on an incoming gradient of 0 as 0.

    Where min() left the branch of an infinite ratio, exp's own gradient would be 0 * inf, a NaN.
    """

    @staticmethod
    def forward(ctx, log_weight):
        ratio = log_weight.exp()
        ctx.save_for_backward(ratio)
        return ratio

    @staticmethod
    def backward(ctx, grad):
        (ratio,) = ctx.saved_tensors
        return torch.where(grad == 0, 0, grad * ratio)

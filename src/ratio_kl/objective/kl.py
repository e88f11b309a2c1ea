"""Estimators of KL(policy || reference) from the sampled token (Schulman 2020, "Approximating KL
Divergence"). `delta` is ref_logps - logps; all are elementwise and differentiable."""

import torch
from torch import Tensor

from .bounds import bounded


def k1(delta: Tensor, limit: float | None) -> Tensor:
    """-delta: unbiased, of either sign. Linear, so `limit` is not needed."""
    return -delta


def k2(delta: Tensor, limit: float | None) -> Tensor:
    """delta^2 / 2: low variance, never negative. Polynomial, so `limit` is not needed."""
    return delta.square() / 2


def k3(delta: Tensor, limit: float | None) -> Tensor:
    """exp(delta) - delta - 1 with delta clamped to +-limit: unbiased inside, never negative.

    expm1 keeps the digits that exp(delta) - 1 loses for the small deltas of most tokens.
    """
    delta = bounded(delta, limit)
    return torch.expm1(delta) - delta


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

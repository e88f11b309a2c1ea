"""Named metrics of a call: detached 0-d tensors, always the same fields, never a host sync."""

from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Tokens


class Metrics(NamedTuple):
    """Means over this call's active tokens; 0 and never NaN where there are none.

    With importance_sampling_level="sequence" the ratio belongs to a sequence: ratio_mean and the
    clip metrics then count each non-empty sequence once.
    """

    policy_loss: Tensor
    """The loss before the entropy bonus, KL included."""
    kl: Tensor
    """KL to the reference, after the bias correction; 0 for beta = 0."""
    entropy: Tensor
    """Entropy in nats."""
    ratio_mean: Tensor
    """Importance ratio."""
    clip_low: Tensor
    """Share of tokens with ratio below the lower bound and A < 0."""
    clip_high: Tensor
    """Share of tokens with ratio above the upper bound and A > 0."""
    clip_fraction: Tensor
    """Share of tokens that are clipped at either bound."""
    high_entropy_fraction: Tensor
    """Share of tokens that the entropy mask keeps; 1 at top_entropy_quantile = 1."""
    active_tokens: Tensor
    """Number of active tokens, int64."""


class Shown(NamedTuple):
    """Per-token values that the metrics summarise."""

    entropies: Tensor
    ratio: Tensor
    kl: Tensor
    low_clipped: Tensor
    high_clipped: Tensor
    kept: Tensor


def metrics_of(policy_loss: Tensor, shown: Shown, tokens: Tokens, level: str) -> Metrics:
    """Summarise a call. Every result is detached."""
    mask = tokens.mask
    count = mask.sum()
    dtype = shown.ratio.dtype

    def token_mean(values: Tensor) -> Tensor:
        return torch.where(mask, values.detach().to(dtype), 0).sum() / count.clamp(min=1)

    def sequence_mean(values: Tensor) -> Tensor:
        active = tokens.layout.sum(mask.to(dtype))
        sums = tokens.layout.sum(torch.where(mask, values.detach().to(dtype), 0))
        return (sums / active.clamp(min=1)).sum() / (active > 0).sum().clamp(min=1)

    ratio_mean = sequence_mean if level == "sequence" else token_mean
    return Metrics(
        policy_loss=policy_loss.detach(),
        kl=token_mean(shown.kl),
        entropy=token_mean(shown.entropies),
        ratio_mean=ratio_mean(shown.ratio),
        clip_low=ratio_mean(shown.low_clipped),
        clip_high=ratio_mean(shown.high_clipped),
        clip_fraction=ratio_mean(shown.low_clipped | shown.high_clipped),
        high_entropy_fraction=token_mean(shown.kept),
        active_tokens=count,
    )

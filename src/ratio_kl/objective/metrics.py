"""Named metrics of a call: detached 0-d tensors, always the same fields, never a host sync."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import RatioKLConfig
from ..field_docs import with_field_docs
from .inputs import Tokens


@with_field_docs
class Metrics(NamedTuple):
    """Means over this call's active tokens; 0 and never NaN where there are none.

    With cp_group over those of all its ranks, so that these hold the same metrics.

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


def metrics_of(
    policy_loss: Tensor, shown: Shown, tokens: Tokens, count: Tensor, config: RatioKLConfig
) -> Metrics:
    """Summarise a call, `count` being its active tokens. Every result is detached."""
    of_tokens = [shown.kl, shown.entropies, shown.kept]
    # Of these only the ratio, 1 on inactive tokens, is not 0 there.
    of_ratios = [shown.ratio.detach() * tokens.mask, shown.low_clipped, shown.high_clipped]
    by_sequence = config.importance_sampling_level == "sequence"
    if not by_sequence:
        of_tokens += of_ratios
    sums = _stacked(of_tokens).flatten(1).sum(1)
    # One sum over the ranks for all of them. New memory: a trainer may scale its loss in place.
    sums = tokens.layout.over_ranks(torch.cat([policy_loss.detach().reshape(1), sums]))
    means = [*(sums[1:] / count.clamp(min=1)).unbind()]
    if by_sequence:
        means = [*means, *_sequence_means(of_ratios, tokens)]
    kl, entropy, kept, ratio, low, high = means
    return Metrics(
        policy_loss=sums[0],
        kl=kl,
        entropy=entropy,
        ratio_mean=ratio,
        clip_low=low,
        clip_high=high,
        clip_fraction=low + high,
        high_entropy_fraction=kept,
        active_tokens=count,
    )


def _stacked(values: list[Tensor]) -> Tensor:
    """[k, *tokens] in the first one's dtype.

    Together they take a few launches, where each alone would.
    """
    dtype = values[0].dtype
    return torch.stack([value.detach().to(dtype) for value in values])


def _sequence_means(values: list[Tensor], tokens: Tokens) -> Iterator[Tensor]:
    """Means over the non-empty sequences of the means over their active tokens."""
    layout = tokens.layout
    stacked = _stacked([*values, tokens.mask])
    here = torch.stack([layout.sum_here(each) for each in stacked.unbind()])
    *sums, active = layout.over_ranks(here).unbind()
    sequences = (active > 0).sum().clamp(min=1)
    for each in sums:
        yield (each / active.clamp(min=1)).sum() / sequences

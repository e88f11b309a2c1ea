"""The surrogate loss between the passes: from logps and entropies to a loss and its metrics.

Plain torch on per-token tensors, with no data-dependent shape. Its gradients with respect to
logps and entropies are all that pass 2 needs to know of it.

On inactive tokens log-probabilities, entropies and advantages are 0 when they come here, so that
log-ratios, KL and every policy term are 0 there by themselves, and the ratio is 1. What gradient
they get means nothing: pass 2 leaves it out. On a GPU each selection less is a launch less, or
three with its gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import RatioKLConfig
from ..distributed.groups import Group, crossed, world_size
from ..distributed.shared_sum import attached
from ..field_docs import with_field_docs
from .entropy import EntropyMask, entropy_bonus, entropy_mask
from .exchange import CallTokens
from .inputs import Tokens
from .kl import KL_ESTIMATORS
from .metrics import Metrics, Shown, metrics_of
from .policy import POLICIES, PRESETS, VESPO_LOG_RANGE, Policy, PolicyTerms, beyond
from .ratio import LEVELS, bounded_exp, masked_difference
from .reduction import REDUCTIONS, SPANS_THE_STEP, Counts


@with_field_docs
class LossOutput(NamedTuple):
    """Result of a call. Per-token tensors are detached, of action_ids' shape, float32 (float64
    for float64 inputs), and neutral on inactive tokens."""

    loss: Tensor
    """0-d, differentiable in hidden, weight and bias. With cp_group this rank's part."""
    metrics: Metrics
    logps: Tensor
    """log-probability of each action; 0 on inactive tokens. Reusable as old_logps."""
    entropies: Tensor
    """Entropy in nats; 0 on inactive tokens."""
    ratio: Tensor
    """Importance ratio; 1 on inactive tokens."""
    kl: Tensor
    """KL to the reference, after the bias correction; 0 on inactive tokens and for beta = 0."""
    low_clipped: Tensor
    """bool: ratio below the lower bound and A < 0."""
    high_clipped: Tensor
    """bool: ratio above the upper bound and A > 0."""
    phi: Tensor | None
    """vespo's weight, 1 on inactive tokens; None for every other loss type."""


@dataclass(frozen=True)
class Step:
    """What a call says about the optimizer step that it is part of."""

    num_items: Tensor | float | None
    """num_items_in_batch."""
    accumulation_steps: int
    entropy_coef: float | Tensor
    group: Group | None
    """Ranks over which the entropy quantile and the normaliser run, and gradients are averaged."""
    exchanged: CallTokens | None
    """Active tokens of this call over the ranks; None where nothing was exchanged."""


def surrogate_loss(
    logps: Tensor, entropies: Tensor, tokens: Tokens, config: RatioKLConfig, step: Step
) -> LossOutput:
    """The loss of `config` from log-probabilities and entropies in the layout of `tokens`."""
    mask, layout = tokens.mask, tokens.layout
    if layout.ranks is not None:
        # The other ranks' sums wait for this one in backward, whether or not it trains.
        logps = attached(logps)
    active = layout.spread(layout.sum(mask.to(logps.dtype))).clamp(min=1)
    policy_name, reduction_name = PRESETS[config.loss_type]
    policy = POLICIES[policy_name]
    old_logps = logps.detach() if tokens.old_logps is None else tokens.old_logps
    log_ratio = logps - old_logps
    log_weight = LEVELS[config.importance_sampling_level](log_ratio, logps, mask, active, layout)
    ratio = bounded_exp(log_weight, config.log_ratio_limit)
    low, high = beyond(policy.bounds(config), ratio.detach(), tokens.advantages)
    terms = PolicyTerms(
        ratio=ratio,
        logps=logps,
        advantages=tokens.advantages,
        beyond=(low, high),
        # A sum over ranks where they share sequences, so only for the policy that uses it.
        log_sequence_weight=(
            None if policy.phi is None else _log_sequence_weight(log_ratio, tokens)
        ),
    )
    both = crossed(layout.ranks, step.group)
    kept = entropy_mask(entropies, mask, config.top_entropy_quantile, both)
    term = _masked_term(policy, terms, tokens, config, kept=kept, active=active)
    kl = _kl(terms, tokens, config)
    if config.beta != 0:
        term = term + config.beta * kl

    counts = _counts(active, tokens, step)
    weight = REDUCTIONS[reduction_name](counts, config)
    spans_the_step = reduction_name in SPANS_THE_STEP and step.num_items is not None
    if step.accumulation_steps != 1 and not spans_the_step:
        weight = weight / step.accumulation_steps
    policy_loss = (term * weight).sum()
    if kept.poison is not None:
        policy_loss = policy_loss + kept.poison
    loss = policy_loss
    if isinstance(step.entropy_coef, Tensor) or step.entropy_coef != 0:
        bonus = entropy_bonus(entropies, kept, layout.ranks) / step.accumulation_steps
        loss = policy_loss - step.entropy_coef * bonus

    shown = Shown(entropies, terms.ratio, kl, low, high, kept.keep)
    phi = None if policy.phi is None else torch.where(mask, policy.phi(terms, config), 1)
    shape = tokens.caller_shape
    return LossOutput(
        loss=loss,
        metrics=metrics_of(policy_loss, shown, tokens, counts.tokens, config),
        logps=logps.detach().reshape(shape),
        entropies=entropies.detach().reshape(shape),
        ratio=terms.ratio.detach().reshape(shape),
        kl=kl.detach().reshape(shape),
        low_clipped=low.reshape(shape),
        high_clipped=high.reshape(shape),
        phi=None if phi is None else phi.reshape(shape),
    )


def _log_sequence_weight(log_ratio: Tensor, tokens: Tokens) -> Tensor:
    """vespo's log w before its clamp: the sequence's summed log-ratio and log sampling ratio."""
    layout = tokens.layout
    total = layout.sum(log_ratio.detach().clamp(-20, 20))
    log_sequence = layout.spread(total)
    if tokens.sampling_ratio is None:
        return log_sequence
    log_sampling = tokens.sampling_ratio.log().clamp(*VESPO_LOG_RANGE)
    return log_sequence + _of_sequence(log_sampling, tokens)


def _of_sequence(log_sampling: Tensor, tokens: Tokens) -> Tensor:
    """Log sampling ratio of each token's sequence: the sum of its tokens', or the one it has.

    A rank with one token of each sequence cannot tell which; the other ranks say it, and where
    none can, the entries are the tokens'. 1 stands on inactive tokens, whose logarithm adds
    nothing.
    """
    layout, reading = tokens.layout, tokens.sampling_ratio_reading
    if layout.ranks is None:
        return log_sampling if reading == "sequence" else layout.spread(layout.sum(log_sampling))
    sums = layout.sum_here(log_sampling)
    vote = sums.new_full((1,), {"token": 1, "either": 0, "sequence": -1}[reading])
    total = layout.over_ranks(torch.cat([sums.reshape(-1), vote]))
    of_tokens = layout.spread(total[:-1].reshape(sums.shape))
    return torch.where(total[-1] >= 0, of_tokens, log_sampling)


def _masked_term(
    policy: Policy,
    terms: PolicyTerms,
    tokens: Tokens,
    config: RatioKLConfig,
    *,
    kept: EntropyMask,
    active: Tensor,
) -> Tensor:
    """The policy term after the off-policy mask, the entropy mask and the sampling ratio."""
    term = policy.term(terms, config)
    if config.off_policy_mask_threshold is not None:
        behaviour = tokens.old_logps if tokens.sampling_logps is None else tokens.sampling_logps
        if behaviour is not None:
            drift = _off_policy_drift(behaviour, terms.logps, active, tokens)
            # So that a NaN, which compares as false, is kept and shows.
            drop = (tokens.advantages < 0) & (drift > config.off_policy_mask_threshold)
            term = torch.where(drop, 0, term)
    if config.top_entropy_quantile != 1:
        term = torch.where(kept.keep, term, 0)
    if tokens.sampling_ratio is not None and not policy.folds_in_sampling_ratio:
        term = term * tokens.sampling_ratio
    return term


def _off_policy_drift(behaviour: Tensor, logps: Tensor, active: Tensor, tokens: Tokens) -> Tensor:
    """Mean of (behaviour - policy) log-probability of each sequence, at its tokens.

    A NaN behaviour log-probability is no evidence and counts 0.
    """
    known = tokens.mask & ~behaviour.isnan()
    drift = masked_difference(behaviour, logps.detach(), known)
    return tokens.layout.spread(tokens.layout.sum(drift)) / active


def _kl(terms: PolicyTerms, tokens: Tokens, config: RatioKLConfig) -> Tensor:
    """KL to the reference at each token; zeros where beta is 0 and no reference is scored."""
    if config.beta == 0 or tokens.ref_logps is None:
        return torch.zeros_like(terms.ratio)
    kl = KL_ESTIMATORS[config.kl_estimator](tokens.ref_logps - terms.logps, config.log_ratio_limit)
    return kl * terms.ratio if config.use_bias_correction_kl else kl


def _counts(active: Tensor, tokens: Tokens, step: Step) -> Counts:
    own = tokens.mask.sum()
    of_sequences, of_group = (own, own) if step.exchanged is None else step.exchanged
    items: Tensor | float = of_group
    if step.num_items is not None:
        items = step.num_items
    if isinstance(items, Tensor):
        # An integer count would divide in torch's default dtype.
        items = items.to(active.dtype)
    return Counts(
        layout=tokens.layout,
        tokens_of_sequence=active,
        tokens=of_sequences,
        items=items,
        ranks=world_size(step.group),
    )

"""The loss written out long-hand on full logits: what every other path is checked against.

Plain autograd, any floating dtype (float64 for checks), no care for speed or memory. It shares
no code with the rest of the package and branches on the loss type in the open, so that it can be
read beside the formulas. Its habits:

- rows that the mask excludes are taken out before anything is computed from them;
- every per-sequence value is spread to [B, T] at once, so that nothing depends on how it came;
- packed input is unpacked to padded rows first, and the outputs are packed again.

Letters: A advantage, s sampling ratio, d log-ratio, r ratio, n active tokens of a sequence.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ratio_kl.config import RatioKLConfig

__all__ = ["ReferenceOutput", "reference_logprob", "reference_loss"]


class ReferenceOutput(NamedTuple):
    """The loss, detached 0-d metrics, and detached per-token tensors shaped as action_ids."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor
    entropies: Tensor
    ratio: Tensor
    kl: Tensor
    low_clipped: Tensor
    high_clipped: Tensor
    phi: Tensor | None


def reference_logprob(
    hidden: Tensor,
    weight: Tensor,
    action_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each action and entropy of its distribution, 0 on inactive tokens.

    Args:
        hidden: [B, T, H] or [N, H]; weight: [V, H]; bias: [V]. Multiplied in their common dtype.
        action_ids, attention_mask: [B, T] or [N]; without a mask every token is active.
        temperature: a float or [B], [B, 1], [B, T] or [N].

    Returns:
        logps and entropies shaped as action_ids, float64 for float64 inputs, else float32.
    """
    active = torch.ones_like(action_ids, dtype=torch.bool)
    active = active if attention_mask is None else attention_mask != 0
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    tau = torch.as_tensor(temperature, dtype=wide, device=hidden.device)
    tau = tau.unsqueeze(1) if tau.dim() == 1 and active.dim() == 2 else tau

    z = hidden[active].to(dtype) @ weight[:vocab_size].to(dtype).T
    z = z if bias is None else z + bias[:vocab_size].to(dtype)
    z = z.to(wide) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / tau.expand(active.shape)[active].unsqueeze(-1)

    shifted = z - z.detach().amax(-1, keepdim=True)
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    logps = log_p.gather(-1, action_ids[active].long().unsqueeze(-1)).squeeze(-1)
    possible = log_p != -math.inf  # 0 log 0 = 0, in the value and in the gradient
    p = torch.where(possible, log_p.exp(), 0)
    entropies = -(p * torch.where(possible, log_p, 0)).sum(-1)

    nothing = torch.zeros(active.shape, dtype=wide, device=z.device)
    return nothing.masked_scatter(active, logps), nothing.masked_scatter(active, entropies)


def reference_loss(
    config: RatioKLConfig,
    hidden: Tensor,
    weight: Tensor,
    action_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    bias: Tensor | None = None,
    sampling_ratio: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    gradient_accumulation_steps: int = 1,
    temperature: float | Tensor | None = None,
    entropy_coef: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    other_entropies: Tensor | None = None,
    world_tokens: int | None = None,
    world_size: int = 1,
) -> ReferenceOutput:
    """The whole loss, as one rank of `world_size` ranks computes it.

    Args:
        hidden to cu_seqlens: as FusedLinearRatioKLLoss takes them.
        other_entropies: [*] entropies of the other ranks' active tokens, for the quantile.
        world_tokens: active tokens of all ranks together; None means this rank's.
    """
    layout = _Layout(action_ids, cu_seqlens)
    active = layout.pad(attention_mask != 0) & layout.inside
    tau = config.temperature if temperature is None else temperature
    tau = torch.as_tensor(tau, dtype=torch.float64, device=hidden.device)
    score = partial(
        reference_logprob,
        action_ids=layout.pad(action_ids),
        attention_mask=active,
        temperature=layout.spread(tau),
        logit_scale=config.logit_scale,
        softcap=config.softcap,
        vocab_size=config.vocab_size,
    )
    logps, entropies = score(hidden.flatten(0, -2)[layout.rows], weight, bias=bias)
    current = logps.detach()
    if config.beta != 0 and ref_hidden is not None:
        ref_weight = weight if ref_weight is None else ref_weight
        ref_bias = bias if ref_bias is None else ref_bias
        ref, _ = score(ref_hidden.flatten(0, -2)[layout.rows], ref_weight, bias=ref_bias)
        ref = ref.detach()
    else:
        ref = layout.tokens(ref_logps, active, current)

    A = layout.tokens(advantages, active, torch.zeros_like(current))
    s = layout.tokens(sampling_ratio, active, torch.ones_like(current))
    d = logps - layout.tokens(old_logps, active, current)
    mu = old_logps if sampling_logps is None else sampling_logps
    gap = None if mu is None else layout.tokens(mu, active, current) - current
    r = _ratio(config, d, logps, active)

    phi = None
    if config.loss_type == "vespo":
        once = layout.is_per_sequence(sampling_ratio)
        phi = _vespo_phi(config, d, A, s, active, s_is_per_sequence=once)
        term = -phi * A * logps
    else:
        term = _policy_term(config, r, A, logps)
    term = torch.where((A < 0) & ~_is_near(config, gap, active), 0, term)
    high = _high_entropy(config, entropies.detach(), active, other_entropies)
    term = torch.where(high != 0, high * term, 0)
    term = term if config.loss_type == "vespo" else term * s
    kl = _kl(config, ref - logps, r)

    share = _share(config, active.to(logps), num_items_in_batch, world_tokens, world_size)
    steps = gradient_accumulation_steps
    if num_items_in_batch is None or config.loss_type not in ("dapo", "cispo", "vespo"):
        share = share / steps  # num_items_in_batch counts the tokens of all steps already
    policy_loss = (share * (term + config.beta * kl)).sum() + 0 * high.sum()
    coef = config.entropy_coef if entropy_coef is None else entropy_coef
    bonus = (entropies * high).sum() / high.sum().clamp(min=1) / steps

    low, up = _clipped(config, r, A)
    m = active.to(r)
    one_vote_a_sequence = m / m.sum(1, keepdim=True).clamp(min=1)
    vote = one_vote_a_sequence if config.importance_sampling_level == "sequence" else m
    metrics = {
        "policy_loss": policy_loss.detach(),
        "kl": _mean(kl, m),
        "entropy": _mean(entropies, m),
        "ratio_mean": _mean(r, vote),
        "clip_low": _mean(low, vote),
        "clip_high": _mean(up, vote),
        "clip_fraction": _mean(low | up, vote),
        "high_entropy_fraction": _mean(high, m),
        "active_tokens": active.sum(),
    }
    return ReferenceOutput(
        loss=policy_loss - coef * bonus,
        metrics=metrics,
        logps=layout.restore(logps),
        entropies=layout.restore(entropies),
        ratio=layout.restore(r, 1),
        kl=layout.restore(kl),
        low_clipped=layout.restore(low),
        high_clipped=layout.restore(up),
        phi=None if phi is None else layout.restore(torch.where(active, phi, 1), 1),
    )


class _Layout:
    """The input as padded [B, T] rows: B sequences, T positions. Padded input is that already."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None) -> None:
        self.shape = like.shape
        index = torch.arange(like.numel(), device=like.device)
        if cu_seqlens is None:
            self.rows = index.view(like.shape)
            self.inside = torch.ones_like(self.rows, dtype=torch.bool)
        else:
            lengths = cu_seqlens.diff().unsqueeze(1)
            position = index[: max(1, int(lengths.max()))]
            self.inside = position < lengths
            self.rows = torch.where(self.inside, cu_seqlens[:-1].unsqueeze(1) + position, 0)

    def pad(self, value: Tensor) -> Tensor:
        """[B, T] of a per-token value; anything at all where there is no token."""
        return value.flatten()[self.rows]

    def spread(self, value: Tensor) -> Tensor:
        """[B, T] of a scalar, a per-sequence or a per-token value."""
        if value.dim() == 0 or self.is_per_sequence(value):
            return value.reshape(-1, 1).expand(self.rows.shape)
        return self.pad(value)

    def tokens(self, value: Tensor | None, active: Tensor, neutral: Tensor) -> Tensor:
        """[B, T] of an optional argument; `neutral` where it is absent or the token inactive."""
        if value is None:
            return neutral
        return torch.where(active, self.spread(value).to(neutral.dtype), neutral)

    def is_per_sequence(self, value: Tensor | None) -> bool:
        """Whether it has one entry a sequence; where both readings fit, it is per token."""
        if value is None or value.shape in (self.shape, (self.shape.numel(),)):
            return False
        return value.shape in ((len(self.rows),), (len(self.rows), 1))

    def restore(self, value: Tensor, neutral: float = 0) -> Tensor:
        """[B, T] back in the shape of action_ids, detached; `neutral` past the last sequence."""
        flat = torch.full((self.shape.numel(),), neutral, dtype=value.dtype, device=value.device)
        flat[self.rows[self.inside]] = value.detach()[self.inside]
        return flat.view(self.shape)


def _sequence_mean(value: Tensor, active: Tensor) -> Tensor:
    """[B, 1] mean over the active tokens, where `value` is 0 elsewhere; 0 if there are none."""
    return value.sum(1, keepdim=True) / active.sum(1, keepdim=True).clamp(min=1)


def _ratio(config: RatioKLConfig, d: Tensor, logps: Tensor, active: Tensor) -> Tensor:
    if config.importance_sampling_level == "token":
        w = d
    elif config.importance_sampling_level == "sequence":
        w = _sequence_mean(d, active).expand_as(d)
    else:
        w = _sequence_mean(d, active).detach() + (logps - logps.detach())
    limit = math.inf if config.log_ratio_limit is None else config.log_ratio_limit
    return torch.where(active, w, 0).clamp(-limit, limit).exp()


def _policy_term(config: RatioKLConfig, r: Tensor, A: Tensor, logps: Tensor) -> Tensor:
    if config.loss_type == "cispo":
        return -r.detach().clamp(max=config.upper_epsilon) * A * logps
    if config.loss_type == "sapo":
        tau = _by(A > 0, A, config.sapo_temperature_pos, config.sapo_temperature_neg)
        return -torch.sigmoid(tau * (r - 1)) * (4 / tau) * A
    clipped = _clamp(r, 1 - config.epsilon_low, 1 + config.upper_epsilon)
    capped = r if config.delta is None else _clamp(r, -math.inf, config.delta)
    return -torch.minimum(capped * A, clipped * A)


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    """torch.clamp, but with gradient 1 at the bounds in every release of torch."""
    return torch.where((x < low) | (x > high), x.detach().clamp(low, high), x)


def _by(condition: Tensor, like: Tensor, yes: float, no: float) -> Tensor:
    """One of two Python numbers a token, in the full precision of `like`."""
    return torch.where(condition, torch.full_like(like, yes), torch.full_like(like, no))


def _vespo_phi(
    config: RatioKLConfig,
    d: Tensor,
    A: Tensor,
    s: Tensor,
    active: Tensor,
    *,
    s_is_per_sequence: bool,
) -> Tensor:
    log_s = s.log().clamp(math.log(1e-8), 20)  # 0 on inactive tokens
    log_s = _sequence_mean(log_s, active) if s_is_per_sequence else log_s.sum(1, keepdim=True)
    log_w = d.detach().clamp(-20, 20).sum(1, keepdim=True) + log_s
    log_w = log_w.clamp(math.log(1e-8), 20)
    k = _by(A >= 0, A, config.vespo_k_pos, config.vespo_k_neg)
    lam = _by(A >= 0, A, config.vespo_lambda_pos, config.vespo_lambda_neg).clamp(min=1e-4)
    return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(nan=0, posinf=0)


def _is_near(config: RatioKLConfig, gap: Tensor | None, active: Tensor) -> Tensor:
    """Whether the sampler was near enough to this policy for a negative advantage to count."""
    if config.off_policy_mask_threshold is None or gap is None:
        return torch.ones_like(active)
    mean = _sequence_mean(torch.where(gap.isnan(), 0, gap), active)
    return mean <= config.off_policy_mask_threshold


def _high_entropy(
    config: RatioKLConfig, entropies: Tensor, active: Tensor, others: Tensor | None
) -> Tensor:
    """1 on active tokens of high entropy, else 0; NaN everywhere if the threshold is NaN."""
    pool = entropies[active] if others is None else torch.cat([entropies[active], others])
    if config.top_entropy_quantile == 1 or pool.numel() == 0:
        return active.to(entropies.dtype)
    threshold = torch.quantile(pool, 1 - config.top_entropy_quantile)
    return ((entropies >= threshold) & active) + 0 * threshold


def _kl(config: RatioKLConfig, delta: Tensor, r: Tensor) -> Tensor:
    """Per token; 0 on inactive tokens, whose delta is 0."""
    if config.beta == 0:
        return torch.zeros_like(delta)
    if config.kl_estimator == "k1":
        kl = -delta
    elif config.kl_estimator == "k2":
        kl = delta**2 / 2
    else:
        limit = math.inf if config.log_ratio_limit is None else config.log_ratio_limit
        kl = delta.clamp(-limit, limit).exp() - delta.clamp(-limit, limit) - 1
    return kl * r if config.use_bias_correction_kl else kl


def _share(
    config: RatioKLConfig, m: Tensor, items: int | Tensor | None, world: int | None, ranks: int
) -> Tensor:
    """[B, T] weight of each token's term in the sum, before gradient accumulation."""
    B, n, total = len(m), m.sum(1, keepdim=True), m.sum()
    if config.loss_type in ("grpo", "sapo"):
        return m / n.clamp(min=1) / B
    if config.loss_type == "bnpo":
        return m / total.clamp(min=1)
    if config.loss_type == "dr_grpo":
        return m / B / m.new_tensor(config.max_completion_length)
    if config.loss_type == "luspo":
        return m / B
    world_tokens = float(total) if world is None else world
    return m * ranks / max(float(world_tokens if items is None else items), 1)


def _clipped(config: RatioKLConfig, r: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    r, never = r.detach(), torch.zeros_like(r, dtype=torch.bool)
    if config.loss_type in ("sapo", "vespo"):
        return never, never
    if config.loss_type == "cispo":
        return never, (r > config.upper_epsilon) & (A > 0)
    low = (r < 1 - config.epsilon_low) & (A < 0)
    return low, (r > 1 + config.upper_epsilon) & (A > 0)


def _mean(value: Tensor, votes: Tensor) -> Tensor:
    return (value.detach() * votes).sum() / votes.sum().clamp(min=1)

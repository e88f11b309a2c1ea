"""The optimisation steps and the held-out evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedTokenizerBase

from .policy import Policy
from .rollout import Rollout
from .sampling import encode, judge, sample
from .task import Problem


class StepResult(NamedTuple):
    """What one step did: a rollout, then `inner_steps` optimizer steps on it."""

    rollout: Rollout
    reward: float
    losses: list[float]
    """One per optimizer step."""
    kl: float
    """KL to the reference at the last optimizer step, like the next two."""
    entropy: float
    clip_fraction: float


class Score(NamedTuple):
    """Held-out replies, sampled at temperature 1."""

    reward: float
    accuracy: float
    """Share of replies with full marks: the right sum, as the equation alone."""
    replies: list[str]


def train(
    policy: Policy, rollouts: Iterable[Rollout], *, lr: float, inner_steps: int
) -> Iterator[StepResult]:
    """One step a rollout, as long as there are rollouts.

    The first optimizer step of a rollout has ratio 1 everywhere; its log-probabilities are the old
    ones for those that follow, where ratios leave 1 and are clipped.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)
    for rollout in rollouts:
        losses = []
        old_logps = None
        for _ in range(inner_steps):
            out = policy(
                rollout.prompts,
                rollout.completions,
                rollout.mask,
                rollout.advantages,
                old_logps,
                rollout.ref_logps,
            )
            out.loss.backward()
            clip_grad_norm_(policy.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            old_logps = out.logps if old_logps is None else old_logps
            losses.append(out.loss.item())
        yield StepResult(
            rollout=rollout,
            reward=rollout.rewards.mean().item(),
            losses=losses,
            kl=out.metrics.kl.item(),
            entropy=out.metrics.entropy.item(),
            clip_fraction=out.metrics.clip_fraction.item(),
        )


def evaluate(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    samples: int,
    length: int,
) -> Score:
    """Sample `samples` replies to each problem, always from the same random numbers."""
    prompts = encode(tokenizer, problems).to(policy.lm_head.weight.device)
    end = tokenizer.eos_token_id
    completions, mask = sample(policy, prompts, samples, length, end, seed=0)
    replies, rewards = judge(tokenizer, problems, completions, mask)
    accuracy = (rewards == 1).float().mean().item()
    return Score(rewards.mean().item(), accuracy, replies[::samples])

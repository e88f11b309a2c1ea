"""What the policy samples in a step, and the recording that another loss can be trained on."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Rollout(NamedTuple):
    """Q prompts of P tokens, G completions of T tokens for each."""

    prompts: Tensor
    """[Q, P] token ids."""
    completions: Tensor
    """[Q * G, T] token ids, the completions of a prompt side by side."""
    mask: Tensor
    """[Q * G, T] bool, the completion's tokens up to and including its end token."""
    rewards: Tensor
    """[Q * G]."""
    advantages: Tensor
    """[Q * G], rewards normalised within each group."""
    ref_logps: Tensor
    """[Q * G, T], log-probabilities under the frozen reference."""


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(reward - mean) / (std + 1e-4) within each group; 0 where a group's rewards are all alike.

    Args:
        rewards: [Q * G], groups of `group_size` side by side.

    Reference: Shao et al. 2024, DeepSeekMath, section 4.1.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


class Recording(NamedTuple):
    """Rollouts of a run, and what its loss gave on them."""

    options: dict[str, float]
    """The options that decide what the run computes."""
    rollouts: list[Rollout]
    losses: list[list[float]]
    """By step, one per optimizer step."""
    peak_bytes: int
    """Peak memory of the loss."""

    def save(self, path: Path) -> None:
        """Write plain containers of tensors, so that loading runs no code."""
        fields = self._asdict()
        fields["rollouts"] = [rollout._asdict() for rollout in self.rollouts]
        torch.save(fields, path)

    @classmethod
    def load(cls, path: Path, options: dict[str, float], device: torch.device) -> "Recording":
        """Read a recording made with the same options.

        Raises:
            SystemExit: there is none, or it was made with other options; says what to run.
        """
        advice = "Run first, with the same options: python -m examples.grpo_demo --loss fused"
        if not path.exists():
            raise SystemExit(f"No recorded rollouts at {path}. {advice}")
        fields = torch.load(path, map_location=device, weights_only=True)
        if fields["options"] != options:
            raise SystemExit(
                f"{path} was recorded with {fields['options']}, not {options}. {advice}"
            )
        fields["rollouts"] = [Rollout(**rollout) for rollout in fields["rollouts"]]
        return cls(**fields)

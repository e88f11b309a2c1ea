"""Inputs of `ratio_kl` on logits that the caller holds, and their truth in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape


@dataclass(frozen=True)
class LogitsProblem:
    """Logits of the policy and the reference at the same N tokens."""

    policy: Tensor
    """[B, T, V]."""
    reference: Tensor
    """[B, T, V]."""
    action_ids: Tensor
    mask: Tensor
    old_logps: Tensor
    """[B, T] float32."""


def random_logits(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> LogitsProblem:
    """Normal logits, the reference's near the policy's; old log-probabilities near the present."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.sequences, shape.length)

    def normal(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    policy = normal(*size, shape.vocabulary)
    reference = normal(*size, shape.vocabulary).mul_(0.1).add_(policy)
    ids = torch.randint(shape.vocabulary, size, generator=generator, device=device)
    mask = torch.ones(size, dtype=torch.bool, device=device)
    old = _logps(policy, ids) + 0.1 * normal(*size, dtype=torch.float64)
    return LogitsProblem(policy, reference, ids, mask, old.float())


def true_ratio_kl(problem: LogitsProblem) -> tuple[Tensor, Tensor]:
    """(ratio, k3 estimate of the KL) of each token in float64."""
    logps = _logps(problem.policy, problem.action_ids)
    delta = _logps(problem.reference, problem.action_ids) - logps
    return (logps - problem.old_logps.double()).exp(), delta.exp() - delta - 1


def _logps(logits: Tensor, ids: Tensor) -> Tensor:
    """[B, T] float64, a sequence at a time."""
    return torch.stack(
        [
            row.double().log_softmax(-1).gather(-1, index[:, None])[:, 0]
            for row, index in zip(logits, ids, strict=True)
        ]
    )

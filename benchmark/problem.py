"""Inputs of one measurement, and how a case thins them out."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .shapes import Shape

IGNORED = -100
"""What cross entropies take for the target of an inactive token."""
WEIGHT_SCALE = 0.02
"""Standard deviation of a freshly initialised head in most models."""


@dataclass(frozen=True)
class Problem:
    """B sequences of T tokens under a head of V rows."""

    hidden: Tensor
    """[B, T, H]."""
    weight: Tensor
    """[V, H]; requires no gradient where the head is frozen."""
    action_ids: Tensor
    """[B, T] int64."""
    mask: Tensor
    """[B, T] bool."""
    advantages: Tensor
    """[B] float32."""
    quantile: float = 1.0
    """Share of tokens, those of highest entropy, that keep their policy term."""
    masked: bool = True
    """False: every token is active, and a call may be spared the mask."""
    with_entropy: bool = False
    """Whether entropies are to be computed whatever the quantile."""

    @property
    def shape(self) -> Shape:
        B, T, H = self.hidden.shape
        return Shape(B * T, H, self.weight.shape[0])

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in (self.hidden, self.weight) if leaf.requires_grad)

    @property
    def targets(self) -> Tensor:
        """[B, T]: action_ids, IGNORED on inactive tokens."""
        return self.action_ids.masked_fill(~self.mask, IGNORED)

    @property
    def needs_entropy(self) -> bool:
        return self.with_entropy or self.quantile < 1

    @property
    def active_share(self) -> float:
        return self.mask.float().mean().item()

    @property
    def input_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes

    def copy(self) -> "Problem":
        """The same numbers elsewhere in memory."""
        return replace(
            self,
            **_leaves(
                self.hidden.detach().clone(),
                self.weight.detach().clone(),
                self.weight.requires_grad,
            ),
        )

    def reduced(self, rows: int, vocabulary: int) -> "Problem":
        """At most 4 sequences of `rows` tokens and the first `vocabulary` rows of the head."""
        step = max(1, self.mask.shape[1] // rows)
        weight = self.weight.detach()[:vocabulary].clone()
        hidden = self.hidden.detach()[:4, ::step].clone()
        return replace(
            self,
            **_leaves(hidden, weight, self.weight.requires_grad),
            action_ids=self.action_ids[:4, ::step] % len(weight),
            mask=self.mask[:4, ::step].contiguous(),
            advantages=self.advantages[:4],
        )


def _leaves(hidden: Tensor, weight: Tensor, trained: bool) -> dict[str, Any]:
    return {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_(trained)}


def random_problem(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Problem:
    """Normal hidden states and head, uniform actions, every token active, no advantage zero."""
    generator = torch.Generator(device).manual_seed(seed)
    B, T = shape.sequences, shape.length

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    hidden, weight = normal(B, T, shape.width), normal(shape.vocabulary, shape.width)
    ids = torch.randint(shape.vocabulary, (B, T), generator=generator, device=device)
    return Problem(
        **_leaves(hidden, weight.mul_(WEIGHT_SCALE), trained=True),
        action_ids=ids,
        mask=torch.ones(B, T, dtype=torch.bool, device=device),
        advantages=torch.randn(B, generator=generator, device=device),
    )


def random_like(problem: Problem, seed: int) -> Problem:
    """Random hidden states and head in the place of the problem's; all else stays."""
    made = random_problem(problem.shape, problem.hidden.dtype, problem.hidden.device, seed)
    hidden = made.hidden.detach().view(problem.hidden.shape)
    return replace(problem, **_leaves(hidden, made.weight.detach(), trained=True))


def half_inactive(mask: Tensor, seed: int) -> Tensor:
    """Completions of random lengths, in pairs that fill one row together: half of the tokens."""
    B, T = mask.shape
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T, (B // 2,), generator=generator)
    lengths = torch.stack([lengths, T - lengths], dim=1).flatten().to(mask.device)
    return torch.arange(T, device=mask.device) < lengths[:, None]


def half_zero(advantages: Tensor) -> Tensor:
    """Every other pair of sequences has rewards that are all alike, so advantage 0."""
    pair = torch.arange(len(advantages), device=advantages.device) // 2
    return torch.where(pair % 2 == 1, 0.0, advantages)

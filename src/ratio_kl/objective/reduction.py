"""Reductions as weights of the tokens: loss = sum(weight * l) over the active tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..config import RatioKLConfig
from .sequences import Layout


@dataclass(frozen=True)
class Counts:
    """What the denominators are made of."""

    layout: Layout
    tokens_of_sequence: Tensor
    """Active tokens of each token's sequence, at least 1, one entry a token."""
    tokens: Tensor
    """0-d int64: active tokens of this call."""
    items: Tensor | float
    """Active tokens of the optimizer step, or of this call over all ranks of the group."""
    ranks: int
    """Gradients are averaged over this many ranks."""


def sequence_mean(counts: Counts, config: RatioKLConfig) -> Tensor:
    """Mean over the tokens of each sequence, then over the sequences, empty ones included.

    Reference: DeepSeekMath (arXiv 2402.03300).
    """
    return 1 / (counts.tokens_of_sequence * max(counts.layout.num_sequences, 1))


def token_mean(counts: Counts, config: RatioKLConfig) -> Tensor:
    """Mean over this call's own active tokens."""
    return 1 / counts.tokens.clamp(min=1).to(counts.tokens_of_sequence.dtype)


def constant_length(counts: Counts, config: RatioKLConfig) -> float:
    """Sum over a constant length: no bias towards short answers (Dr. GRPO, arXiv 2503.20783)."""
    assert config.max_completion_length is not None
    return 1 / (max(counts.layout.num_sequences, 1) * config.max_completion_length)


def global_token_mean(counts: Counts, config: RatioKLConfig) -> Tensor | float:
    """Mean over the active tokens of all ranks or of the optimizer step (DAPO, arXiv 2503.14476).

    Multiplied by the ranks, because gradients are averaged over them afterwards.
    """
    items = counts.items
    return counts.ranks / (items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1))


def sequence_sum(counts: Counts, config: RatioKLConfig) -> float:
    """Sum over the tokens of each sequence, mean over the sequences (LUSPO, arXiv 2602.05261)."""
    return 1 / max(counts.layout.num_sequences, 1)


Reduction = Callable[[Counts, RatioKLConfig], Tensor | float]

REDUCTIONS: dict[str, Reduction] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant_length": constant_length,
    "global_token_mean": global_token_mean,
    "sequence_sum": sequence_sum,
}

SPANS_THE_STEP = frozenset({"global_token_mean"})
"""Reductions whose num_items_in_batch already counts every micro-batch of the optimizer step."""

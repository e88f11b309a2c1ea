"""Padded and packed layouts: per-sequence sums over tokens, and their way back to the tokens.

`sum` and `spread` are each other's transposes, so each one's gradient is the other. Both are
deterministic: no atomics, no scatter. Where the tokens of a sequence lie on several ranks, `sum` is
over all of them, in forward and in backward.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checks.values import check_counts
from ..distributed.groups import Group
from ..distributed.shared_sum import shared_sum


@dataclass(frozen=True)
class Layout(ABC):
    """How tokens belong to S sequences; a per-token tensor is [B, T] or [N]."""

    shape: tuple[int, ...]
    """Shape of a per-token tensor."""
    ranks: Group | None = field(default=None, kw_only=True)
    """Over which the tokens of each sequence are cut; None: all of them are here."""

    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over the tokens of each sequence, wherever they lie."""
        return self.over_ranks(self.sum_here(tokens))

    def over_ranks(self, parts: Tensor) -> Tensor:
        """Sum over the ranks that hold parts of the sequences; `parts` itself without them."""
        return shared_sum(parts, self.ranks)

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """S, empty sequences included."""

    @abstractmethod
    def sum_here(self, tokens: Tensor) -> Tensor:
        """Sum over this rank's tokens of each sequence."""

    @abstractmethod
    def spread(self, sequences: Tensor) -> Tensor:
        """A value of each sequence at each of its tokens; 0 at tokens of no sequence."""

    @abstractmethod
    def from_caller(self, sequences: Tensor) -> Tensor:
        """A caller's [S] or [S, 1] tensor in the shape that `sum` returns."""


@dataclass(frozen=True)
class Padded(Layout):
    """[B, T]: a row is a sequence."""

    @property
    def num_sequences(self) -> int:
        return self.shape[0]

    def sum_here(self, tokens: Tensor) -> Tensor:
        return tokens.sum(1, keepdim=True)

    def spread(self, sequences: Tensor) -> Tensor:
        return sequences.expand(self.shape)

    def from_caller(self, sequences: Tensor) -> Tensor:
        return sequences.reshape(self.num_sequences, 1)


@dataclass(frozen=True)
class Packed(Layout):
    """[N]: sequence i is tokens cu_seqlens[i] : cu_seqlens[i + 1]; later tokens belong to none."""

    cu_seqlens: Tensor
    """[S + 1] int64."""

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def sum_here(self, tokens: Tensor) -> Tensor:
        return segment_sum(tokens, self.cu_seqlens)

    def spread(self, sequences: Tensor) -> Tensor:
        return segment_spread(sequences, self.cu_seqlens, self.shape[0])

    def from_caller(self, sequences: Tensor) -> Tensor:
        return sequences.reshape(self.num_sequences)


@torch.library.custom_op("ratio_kl::segment_sum", mutates_args=())
def segment_sum(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] values -> [S] sums over cu_seqlens[i] : cu_seqlens[i + 1], in a fixed order."""
    # Bad offsets may not be known to be bad yet; segment_reduce would read wherever they point.
    offsets = cu_seqlens.clamp(0, tokens.shape[0]).cummax(0).values
    # segment_reduce adds one after the other: in float64, so that long sequences lose no digits.
    sums = torch.segment_reduce(
        tokens.to(torch.float64).contiguous(),
        "sum",
        offsets=offsets,
        axis=0,
        unsafe=True,
        initial=0,
    )
    return sums.to(tokens.dtype, copy=True)


@segment_sum.register_fake
def _(tokens, cu_seqlens):
    return tokens.new_empty(cu_seqlens.shape[0] - 1)


@torch.library.custom_op("ratio_kl::segment_spread", mutates_args=())
def segment_spread(sequences: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[S] values -> [N]: each at the tokens of its segment, 0 at tokens past the last one."""
    positions = torch.arange(tokens, device=cu_seqlens.device)
    segment = torch.searchsorted(cu_seqlens[1:], positions, right=True)
    return torch.cat([sequences, sequences.new_zeros(1)])[segment]


@segment_spread.register_fake
def _(sequences, cu_seqlens, tokens):
    return sequences.new_empty(tokens)


@torch.library.custom_op("ratio_kl::packed_mask", mutates_args=())
def packed_mask(
    mask: Tensor, cu_seqlens: Tensor, ambiguous: bool, checks: str
) -> tuple[Tensor, Tensor]:
    """A copy of the bool mask [N], and how often cu_seqlens [S + 1] breaks each rule: int64 [5].

    A copy, so that a compiler which drops what nobody uses keeps the check. `ambiguous`: an
    argument may have one entry a token or one a sequence, so that these must be the same.

    Raises:
        ValueError: cu_seqlens does not start at 0, decreases, ends past N, or leaves active
            tokens past its last entry. On an accelerator at the host's next read.
    """
    tokens = mask.shape[0]
    past_the_last = torch.arange(tokens, device=mask.device) >= cu_seqlens[-1]
    faults = (
        cu_seqlens[0] != 0,
        cu_seqlens[1:] < cu_seqlens[:-1],
        cu_seqlens[-1] > tokens,
        mask & past_the_last,
        cu_seqlens != torch.arange(len(cu_seqlens), device=mask.device)
        if ambiguous
        else cu_seqlens.new_zeros((), dtype=torch.bool),
    )
    counts = torch.stack([fault.sum() for fault in faults])
    check_counts(counts, packing_error, checks)
    return mask.clone(), counts


@packed_mask.register_fake
def _(mask, cu_seqlens, ambiguous, checks):
    return torch.empty_like(mask), mask.new_empty(RULES, dtype=torch.int64)


_PACKING_RULES = (
    "must start at 0; got another first entry",
    "must never decrease; got {} below the one before",
    "must end at N, the number of tokens, or before; got a last entry beyond",
    "must cover every active token: attention_mask must be 0 past its last entry; got {} active "
    "token(s) there",
    "has as many sequences as there are tokens, so that a 1-D argument could have one entry a "
    "token or one a sequence: pass it as [S, 1] or [1, N]",
)
RULES = len(_PACKING_RULES)


def packing_error(*counts: int) -> ValueError:
    """The error for the rules that are broken, so often each."""
    broken = [
        rule.format(count) for rule, count in zip(_PACKING_RULES, counts, strict=True) if count
    ]
    return ValueError(f"cu_seqlens {'; '.join(broken)}")


def _save_segments(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.tokens = inputs[0].shape[0]


def _segment_sum_backward(ctx, grad):
    (cu_seqlens,) = ctx.saved_tensors
    return segment_spread(grad, cu_seqlens, ctx.tokens), None


def _segment_spread_backward(ctx, grad):
    (cu_seqlens,) = ctx.saved_tensors
    return segment_sum(grad, cu_seqlens), None, None


segment_sum.register_autograd(_segment_sum_backward, setup_context=_save_segments)
segment_spread.register_autograd(_segment_spread_backward, setup_context=_save_segments)

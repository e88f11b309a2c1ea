"""What the ranks of a group tell each other between the passes: one small sum a call and group.

The counts of bad values ride along, so that a bad id on one rank raises on every rank and none
waits for a collective that another will not reach.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.values import bad_values_error, check_counts
from ..config import RatioKLConfig
from ..distributed.groups import Group, sum_over
from .inputs import Tokens
from .policy import PRESETS
from .reduction import SPANS_THE_STEP
from .sequences import RULES, packing_error


class CallTokens(NamedTuple):
    """Active tokens of a call, 0-d int64 each."""

    of_sequences: Tensor
    """Of this rank's sequences, on whichever ranks they lie."""
    of_group: Tensor
    """Of all ranks."""


def communicates(
    config: RatioKLConfig, num_items: object, group: Group | None, cp_group: Group | None
) -> bool:
    """Whether a call needs the other ranks: for the entropy quantile or for a token count."""
    if cp_group is not None:
        return True
    if group is None:
        return False
    counts_tokens = PRESETS[config.loss_type][1] in SPANS_THE_STEP and num_items is None
    return counts_tokens or config.top_entropy_quantile != 1


def exchange(
    tokens: Tokens, bad_values: Sequence[Tensor], vocab_size: int, group: Group | None, checks: str
) -> CallTokens:
    """Active tokens of all ranks, once it is known that no rank holds a bad value.

    Counted over the ranks that share sequences, then over `group`.

    Args:
        bad_values: of each pass on this rank, counts of bad ids and temperatures, int64 [1] or [2].
        vocab_size: for the error's text.

    Raises:
        ValueError: on every rank, for the sum of their counts. On an accelerator at the host's
            next read.
    """
    # Both passes see the same ids and temperatures, so the larger count holds the other's.
    worst = torch.stack(tuple(bad_values)).amax(0)
    packing = tokens.packing_faults
    parts = [
        tokens.mask.sum().reshape(1),
        torch.nn.functional.pad(worst, (0, 2 - worst.shape[0])),
        worst.new_zeros(RULES) if packing is None else packing,
    ]
    of_sequences = sum_over(torch.cat(parts), tokens.layout.ranks)
    count = _checked_count(sum_over(of_sequences, group), vocab_size, checks)
    return CallTokens(of_sequences[0], count)


@torch.library.custom_op("ratio_kl::checked_count", mutates_args=())
def _checked_count(sums: Tensor, vocab_size: int, checks: str) -> Tensor:
    """The first of the sums, once the others, counts of bad values, have been looked at."""
    check_counts(sums[1:], partial(_error, vocab_size), checks)
    return sums[0].clone()


@_checked_count.register_fake
def _(sums, vocab_size, checks):
    return sums.new_empty(())


# Its sum is read for few losses, its check counts for all: no compiler may drop it as dead code.
torch.fx.node.has_side_effect(torch.ops.ratio_kl.checked_count.default)


def _error(vocab_size: int, ids: int, temperatures: int, *packing: int) -> ValueError:
    error = bad_values_error(vocab_size, ids, temperatures)
    if ids == temperatures == 0:
        error = packing_error(*packing)
    return ValueError(f"{error} (all ranks of the process group together)")

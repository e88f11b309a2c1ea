"""The mask of high-entropy tokens, over all ranks, and the entropy bonus.

Reference of the mask: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv 2506.01939).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import check_device, check_floating, check_real, check_shape
from ..config import check_real_option
from ..distributed.groups import Group, Ranks, resolve, sum_over
from ..distributed.quantile import masked_quantile


class EntropyMask(NamedTuple):
    """Which active tokens keep their policy term."""

    keep: Tensor
    """bool, one entry a token."""
    poison: Tensor | None
    """0-d: 0, or NaN if an active token's entropy anywhere is NaN, so that the loss shows it. None
    where no entropy was looked at."""


def entropy_mask(
    entropies: Tensor, mask: Tensor, quantile: float, group: Ranks | None
) -> EntropyMask:
    """Active tokens with entropy at least the (1 - quantile)-quantile of all ranks' active ones.

    Carries no gradient. Ties at the threshold are all kept. A quantile of 1 keeps every active
    token and communicates nothing.
    """
    entropies = entropies.detach()
    if quantile == 1:
        return EntropyMask(mask, None)
    if entropies.dtype in (torch.bfloat16, torch.float16):
        entropies = entropies.float()
    threshold = masked_quantile(entropies, mask, 1 - quantile, group)
    # A clamp lets NaN through and makes 0 of all else, in one launch.
    return EntropyMask(mask & (entropies >= threshold), threshold.clamp(0, 0))


def high_entropy_mask(
    entropies: Tensor, mask: Tensor, quantile: float, group: object = None
) -> Tensor:
    """Mask of the active tokens in the top `quantile` share by entropy, over all ranks.

    Args:
        entropies: any shape, floating point; ignored where `mask` is zero.
        mask: shape of entropies, bool, int or float; non-zero marks active tokens.
        quantile: share to keep, in [0, 1]; 1 keeps every active token, 0 those of maximal entropy.
        group: process group whose ranks share one threshold. None: the default group where
            torch.distributed is initialised; "local": this process alone.

    Returns:
        bool tensor of entropies' shape: entropies >= quantile(active entropies, 1 - quantile)
        (linear interpolation), and active. No token is kept if one active entropy is NaN.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or value.
    """
    entropies, mask = check_floating("entropies", entropies), check_real("mask", mask)
    check_shape("mask", mask, (tuple(entropies.shape), "entropies.shape"))
    check_device("mask", mask, entropies.device, owner="entropies")
    share = check_real_option("top_entropy_quantile", quantile, name="quantile")
    return entropy_mask(entropies, mask != 0, share, resolve(group, name="group")).keep


def entropy_bonus(entropies: Tensor, keep: EntropyMask, cp_group: Group | None = None) -> Tensor:
    """Mean entropy, in nats, of the kept tokens; differentiable, 0 where none is kept.

    Over cp_group it is this rank's part of that mean.
    """
    count = sum_over(keep.keep.sum(), cp_group)
    bonus = torch.where(keep.keep, entropies, 0).sum() / count.clamp(min=1)
    return bonus if keep.poison is None else bonus + keep.poison

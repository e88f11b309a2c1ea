"""The quantile of the active values of all ranks of a group, with linear interpolation.

    rank = q (n - 1);  below = floor(rank);  above = ceil(rank);  x sorted, n of them active
    quantile = x[below] + (rank - below) (x[above] - x[below])

Every rank sorts its own values once. With one rank the order statistics are then two reads.
Over several ranks two routes find the same two numbers:

- "gather" sends every active value to every rank, which sorts them all;
- "histogram" sends counts of fixed size, so that its traffic does not grow with the values: a
  radix selection over the bits of the float, from the top, each digit found by one all-reduced
  table of how many values lie at or below each of its upper bounds. Sorted values make such a
  table a binary search: no scatter, no atomics, no shape that depends on data.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .groups import Ranks, gather_over, min_over, sum_over

ROUTES = ("gather", "histogram")

GATHER_TOKENS = 20_480
"""Up to so many values in all (ranks times the longest rank's count) the CPU takes the gather
route, past it the histograms. There both send as many bytes, whatever the number of ranks: 4 a
float32 value against 2 * 40,968 for the tables. By time the routes crossed at 20,000 values with
2 gloo ranks and at 65,000 with 4, on two shared cores (benchmark/quantile.py)."""

TORCH_LIMIT = 2**24
"""torch.quantile takes up to so many values; float32 ranks are exact integers up to there."""

_DIGIT_BITS = 11


def masked_quantile(
    values: Tensor,
    mask: Tensor,
    quantile: float,
    group: Ranks | None = None,
    route: str | None = None,
) -> Tensor:
    """The `quantile`-quantile of values[mask] over all ranks of the group.

    Equal bit for bit to `torch.quantile` of the concatenated active values up to 2**24 of them
    (ranks in the dtype of the values) and to `numpy.quantile` beyond (ranks in float64), except
    that -0.0 counts as 0.0. No part of it depends on how the values are cut over the ranks, and
    every rank of the group must call it, one without an active value too.

    Args:
        values: any shape, float32 or float64; bfloat16 and float16 are widened to float32. The
            same dtype on every rank; the shapes may differ.
        mask: like values, bool or a number; non-zero marks active values. What inactive values
            hold has no effect.
        quantile: in [0, 1].
        group: from `resolve`; None for this rank alone.
        route: "gather" or "histogram", the same on every rank; None picks. On the CPU it goes by
            the number of values, which the ranks exchange first. On an accelerator, where that
            would make the host wait, and under torch.compile it is "histogram".

    Returns:
        0-d tensor without a gradient, the same on every rank: NaN where an active value is NaN,
        +inf (which no finite value reaches, so that nothing is kept) where none is active.

    Raises:
        TypeError: quantile is not a number.
        ValueError: quantile, route, a dtype, shape or device is not as above. All before any
            collective.
    """
    _check(values, mask, quantile, route, group)
    active = mask if mask.dtype == torch.bool else mask != 0
    ordered, count = _sort_active(values.detach().reshape(-1), active.reshape(-1))
    host_may_wait = values.device.type == "cpu" and not torch.compiler.is_compiling()
    if group is not None and route is None and not host_may_wait:
        route = "histogram"
    if group is not None and route != "histogram":
        counts = gather_over(count, group)
        longest = int(counts.max())
        if route is None and longest * group.size > GATHER_TOKENS:
            route = "histogram"
        else:
            ordered, count = _gather_active(ordered, counts, longest, group)
    if route == "histogram":
        return _interpolate(*_select(ordered, count, float(quantile), group))
    if ordered.shape[0] <= TORCH_LIMIT:
        return _interpolate_few(*_read(ordered, count, float(quantile)))
    return _interpolate(*_read(ordered, count, float(quantile)))


def _check(
    values: Tensor, mask: Tensor, quantile: object, route: str | None, group: Ranks | None
) -> None:
    if isinstance(quantile, bool) or not isinstance(quantile, (int, float)):
        raise TypeError(f"quantile must be a number in [0, 1]; got {quantile!r}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be a number in [0, 1]; got {quantile!r}")
    if not values.is_floating_point() or values.dtype.itemsize == 1:
        raise ValueError(
            "values must be float64, float32, bfloat16 or float16; got "
            f"{str(values.dtype).removeprefix('torch.')}"
        )
    if values.shape != mask.shape:
        raise ValueError(
            f"mask must have the shape of values, {tuple(values.shape)}; got {tuple(mask.shape)}"
        )
    if values.device != mask.device:
        raise ValueError(
            f"mask must be on the device of values, {values.device}; got {mask.device}"
        )
    if route is not None and route not in ROUTES:
        raise ValueError(f"route must be None or one of {', '.join(ROUTES)}; got {route!r}")
    if route == "gather" and group is not None and torch.compiler.is_compiling():
        raise ValueError(
            "route='gather' reads the longest rank's count on the host and cannot be compiled; "
            "expected None or 'histogram'"
        )


class _Neighbours(NamedTuple):
    """The two order statistics around the quantile, every field 0-d."""

    below: Tensor
    above: Tensor
    rank: Tensor
    """q (n - 1), float64: its fraction is the weight of `above`."""
    total: Tensor
    """Number of active values."""
    has_nan: Tensor


def _sort_active(values: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The values in ascending order, the active ones first, and how many those are.

    The sort puts NaN last. So NaN stands in for what is inactive, and the count alone says where
    the active values end: an active inf or NaN lies within it.
    """
    if values.dtype.itemsize == 2:
        values = values.float()
    if values.numel() == 0:
        values, active = values.new_zeros(1), active.new_zeros(1)
    # The order of the two zeros in a sort is undefined, so there is only one of them: -0 + 0 is 0.
    values = values + 0.0
    return torch.where(active, values, torch.nan).sort().values, active.sum()


def _gather_active(
    ordered: Tensor, counts: Tensor, longest: int, group: Ranks
) -> tuple[Tensor, Tensor]:
    """All ranks' active values in order, and their number; each rank sends `longest` values."""
    longest = max(longest, 1)
    mine = ordered[:longest]
    mine = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
    active = torch.arange(longest, device=counts.device) < counts.unsqueeze(1)
    return _sort_active(gather_over(mine, group).reshape(-1), active.reshape(-1))


def _rank(last: Tensor, quantile: float, dtype: torch.dtype, most: int | None = None) -> Tensor:
    """Position of the quantile among `last` + 1 values, float64; `most` of them, if known."""
    as_torch = (last.to(dtype) * quantile).double()
    if most is not None and most <= TORCH_LIMIT:
        return as_torch
    return torch.where(last < TORCH_LIMIT, as_torch, last.double() * quantile)


def _read(ordered: Tensor, count: Tensor, quantile: float) -> _Neighbours:
    """The neighbours of the quantile, all values being here."""
    last = (count - 1).clamp(min=0)
    rank = _rank(last, quantile, ordered.dtype, most=ordered.shape[0])
    below, above, largest = ordered.gather(
        0, torch.stack([rank.floor().long(), rank.ceil().long(), last])
    ).unbind()
    return _Neighbours(below, above, rank, count, largest.isnan())


def _select(ordered: Tensor, count: Tensor, quantile: float, group: Ranks | None) -> _Neighbours:
    """The neighbours of the quantile over all ranks, by all-reduced tables of counts."""
    keys = _keys(ordered)
    bits = shift = 8 * keys.dtype.itemsize
    found, total = keys.new_zeros(()), count
    while shift > 0:
        is_top = shift == bits
        digit_bits = min(_DIGIT_BITS, shift)
        shift -= digit_bits
        # The top digit carries the sign.
        first = -(1 << (digit_bits - 1)) if is_top else 0
        digits = torch.arange(first, first + (1 << digit_bits), device=keys.device)
        upper = found + (digits.to(keys.dtype) << shift) + ((1 << shift) - 1)
        at_most = torch.searchsorted(keys, upper, right=True).minimum(count)
        at_most = sum_over(at_most, group)
        if is_top:
            total = at_most[-1]
            rank = _rank((total - 1).clamp(min=0), quantile, ordered.dtype)
        # With no active value anywhere no digit reaches the position: stay on the last one.
        index = (at_most <= rank.floor()).sum().clamp(max=digits.numel() - 1)
        found = found + ((index + first).to(keys.dtype) << shift)
    larger, has_nan = _next_key(keys, count, found, group)
    reached = at_most.gather(0, index.unsqueeze(0))[0]
    above = torch.where(rank.ceil() < reached, found, larger)
    below, above = _floats(torch.stack([found, above])).unbind()
    return _Neighbours(below, above, rank, total, has_nan)


def _next_key(
    keys: Tensor, count: Tensor, key: Tensor, group: Ranks | None
) -> tuple[Tensor, Tensor]:
    """The smallest active key above `key` over all ranks, and whether any active key is NaN."""
    nan_key = torch.iinfo(keys.dtype).max
    place = torch.searchsorted(keys, key.unsqueeze(0), right=True)[0]
    at_place = keys.gather(0, torch.stack([place, count - 1]).clamp(0, keys.numel() - 1))
    larger = torch.where(place < count, at_place[0], nan_key)
    without_nan = ((count == 0) | (at_place[1] != nan_key)).to(keys.dtype)
    larger, without_nan = min_over(torch.stack([larger, without_nan]), group).unbind()
    return larger, without_nan == 0


def _keys(values: Tensor) -> Tensor:
    """Integers in the order of the floats, NaN (of any sign and payload) the largest."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    largest = torch.iinfo(integer).max
    key = values.view(integer)
    key = torch.where(key < 0, key ^ largest, key)
    return torch.where(values.isnan(), largest, key)


def _floats(keys: Tensor) -> Tensor:
    """Inverse of `_keys`."""
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    return bits.view(torch.float32 if keys.dtype == torch.int32 else torch.float64)


@torch.library.custom_op("ratio_kl::interpolate_few", mutates_args=())
def _interpolate_few(
    below: Tensor, above: Tensor, rank: Tensor, total: Tensor, has_nan: Tensor
) -> Tensor:
    """The quantile from `_Neighbours` of at most TORCH_LIMIT values.

    An operator, so that a compiler does not contract products and sums into other roundings,
    perhaps not the same on every rank.
    """
    threshold = torch.lerp(below, above, (rank - rank.floor()).to(below.dtype))
    return threshold.masked_fill_(has_nan, torch.nan).masked_fill_(total == 0, torch.inf)


@torch.library.custom_op("ratio_kl::interpolate_quantile", mutates_args=())
def _interpolate(
    below: Tensor, above: Tensor, rank: Tensor, total: Tensor, has_nan: Tensor
) -> Tensor:
    """The quantile from `_Neighbours`, by torch's formula or by numpy's; an operator too."""
    dtype, weight = below.dtype, rank - rank.floor()
    as_torch = torch.lerp(below, above, weight.to(dtype))
    step = above - below
    as_numpy = torch.where(
        weight < 0.5,
        below + step * weight.to(dtype),
        above - step * (1 - weight).to(dtype),
    )
    threshold = torch.where(total <= TORCH_LIMIT, as_torch, as_numpy)
    threshold = torch.where(has_nan, torch.nan, threshold)
    return torch.where(total > 0, threshold, torch.inf)


@_interpolate_few.register_fake
@_interpolate.register_fake
def _(below: Tensor, above: Tensor, rank: Tensor, total: Tensor, has_nan: Tensor) -> Tensor:
    return torch.empty_like(below)

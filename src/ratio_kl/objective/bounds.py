"""Clamps whose gradient is 1 within the bounds and at them, 0 beyond, and that do not hide NaN.

torch.clamp stops the gradient at NaN, so that a NaN loss would have finite gradients, which neither
gradient clipping nor a loss scaler notices. At a bound its gradient is 1 in some releases of torch
and, from 2.14 on, 0.
"""

import math

import torch
from torch import Tensor


def in_range(bound: float, dtype: torch.dtype) -> float:
    """The bound, or infinity of its sign beyond the dtype's range, where torch takes no number."""
    return bound if abs(bound) <= torch.finfo(dtype).max else math.copysign(math.inf, bound)


def clamped(values: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """`values` clamped to [low, high]."""
    low, high = in_range(low, values.dtype), in_range(high, values.dtype)
    limited = values.detach().clamp(low, high)
    return torch.where((values < low) | (values > high), limited, values)


def bounded(values: Tensor, limit: float | None) -> Tensor:
    """`values` clamped to +-limit; None is no limit."""
    return values if limit is None else clamped(values, -limit, limit)

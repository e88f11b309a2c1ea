"""A clamp that does not hide NaN."""

import torch
from torch import Tensor


def bounded(values: Tensor, limit: float | None) -> Tensor:
    """`values` clamped to +-limit, with gradient 1 within, at the bound too, and 0 beyond.

    torch.clamp would stop the gradient at NaN, so that a NaN loss had finite gradients, which
    neither gradient clipping nor a loss scaler would notice. None is no limit.
    """
    if limit is None:
        return values
    clamped = values.detach().clamp(-limit, limit)
    return torch.where(values.abs() > limit, clamped, values)

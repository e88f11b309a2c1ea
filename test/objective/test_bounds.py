"""The clamp of log-ratios: its value and its gradient within, at and beyond the bound."""

import math
import sys

import pytest
import torch

from ratio_kl.objective.bounds import bounded, clamped


@pytest.mark.parametrize(
    ("value", "clamped", "slope"),
    [
        (-3.0, -2.0, 0),
        (-2.0, -2.0, 1),
        (0.5, 0.5, 1),
        (2.0, 2.0, 1),
        (3.0, 2.0, 0),
        (-math.inf, -2.0, 0),
    ],
)
def test_within_at_and_beyond_the_bound(value: float, clamped: float, slope: float) -> None:
    x = torch.tensor(value, requires_grad=True)
    result = bounded(x, 2.0)
    result.backward()
    assert result.item() == clamped
    assert x.grad.item() == slope


def test_nan_keeps_its_gradient() -> None:
    """torch.clamp gives NaN the gradient 0, so that a NaN loss looks sound to gradient clipping."""
    x = torch.tensor(math.nan, requires_grad=True)
    result = bounded(x, 2.0)
    result.backward()
    assert result.isnan()
    assert x.grad.item() == 1


def test_a_bound_beyond_the_range_of_the_dtype_is_none() -> None:
    """torch refuses to clamp float32 at a larger number; "no bound" is written so."""
    x = torch.tensor([-math.inf, -1e30, 2.0, math.inf])
    assert torch.equal(bounded(x, sys.float_info.max), x)
    assert torch.equal(clamped(x, high=1e39), x)
    assert torch.equal(clamped(x, low=-1e39, high=1.0), x.clamp(max=1.0))
    wide = torch.tensor([1e300], dtype=torch.float64)
    assert clamped(wide, high=1e200).item() == 1e200


def test_no_limit_is_no_change() -> None:
    x = torch.tensor([-1e30, math.inf])
    assert bounded(x, None) is x

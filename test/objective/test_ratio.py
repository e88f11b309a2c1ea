"""Importance ratios of the three levels, by hand, with their gradients."""

import math

import pytest
import torch
from torch import Tensor

from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS
from ratio_kl.objective.ratio import LEVELS, bounded_exp, masked_difference
from ratio_kl.objective.sequences import Padded

TOLERANCE = 1e-15  # float64, one or two roundings

# Log-ratios 0.3 and -0.1 and an inactive place; one token of 0.5; nothing.
MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]]).bool()
LOGPS = torch.tensor([[-1.0, -2.0, -3.0]] * 3, dtype=torch.float64)
OLD = LOGPS - torch.tensor([[0.3, -0.1, 7.0], [7.0, 0.5, 7.0], [7.0, 7.0, 7.0]]).double()


def log_weights(level: str, logps: Tensor) -> Tensor:
    layout = Padded(tuple(MASK.shape))
    active = layout.spread(layout.sum(MASK.double()).clamp(min=1))
    return LEVELS[level](masked_difference(logps, OLD, MASK), logps, MASK, active, layout)


def test_values() -> None:
    expected = {
        "token": [[0.3, -0.1, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]],
        "sequence": [[0.1, 0.1, 0.0], [0.0, 0.5, 0.0], [0.0] * 3],
        "sequence_token": [[0.1, 0.1, 0.0], [0.0, 0.5, 0.0], [0.0] * 3],
    }
    assert set(expected) == set(IMPORTANCE_SAMPLING_LEVELS) == set(LEVELS)
    for level, values in expected.items():
        got = log_weights(level, LOGPS)
        torch.testing.assert_close(got, torch.tensor(values).double(), rtol=1e-7, atol=1e-7)


def test_gradients() -> None:
    # d w[0, 0] / d logps: the token itself, half of each active token, the token itself.
    expected = {
        "token": [1.0, 0.0, 0.0],
        "sequence": [0.5, 0.5, 0.0],
        "sequence_token": [1.0, 0.0, 0.0],
    }
    for level, row in expected.items():
        logps = LOGPS.clone().requires_grad_()
        (grad,) = torch.autograd.grad(log_weights(level, logps)[0, 0], logps)
        assert grad[0].tolist() == row
        assert not grad[1:].any()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 200.0])
def test_inactive_places_are_selected_away(junk: float) -> None:
    logps = LOGPS.clone().requires_grad_()
    old = torch.where(MASK, OLD, junk)
    difference = masked_difference(logps, old, MASK)
    assert not difference[~MASK].any()
    (grad,) = torch.autograd.grad(difference.exp().sum(), logps)
    assert not grad[~MASK].any()
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("value", "limit", "expected", "slope"),
    [
        (0.5, 20.0, math.exp(0.5), math.exp(0.5)),
        (2.0, 2.0, math.exp(2.0), math.exp(2.0)),  # at the limit the gradient passes
        (3.0, 2.0, math.exp(2.0), 0.0),
        (-3.0, 2.0, math.exp(-2.0), 0.0),
        (3.0, None, math.exp(3.0), math.exp(3.0)),
        (1000.0, 20.0, math.exp(20.0), 0.0),
        (1000.0, None, math.inf, math.inf),  # off means off
    ],
)
def test_bounded_exp(value: float, limit: float | None, expected: float, slope: float) -> None:
    w = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    r = bounded_exp(w, limit)
    assert math.isclose(r.item(), expected, rel_tol=TOLERANCE)
    assert math.isclose(torch.autograd.grad(r, w)[0].item(), slope, rel_tol=TOLERANCE)

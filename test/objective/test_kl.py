"""Each KL estimator by hand, with its slope, inside and beyond the limit."""

import math

import pytest
import torch

from by_hand import KL_CASES, KLCase
from ratio_kl.config import KL_ESTIMATORS as NAMES
from ratio_kl.objective.kl import KL_ESTIMATORS


@pytest.mark.parametrize("case", KL_CASES, ids=str)
def test_estimate_and_slope(case: KLCase) -> None:
    delta = torch.tensor(case.delta, dtype=torch.float64, requires_grad=True)
    kl = KL_ESTIMATORS[case.estimator](delta, case.limit)
    (slope,) = torch.autograd.grad(kl, delta)
    assert math.isclose(kl.item(), case.kl, rel_tol=1e-14, abs_tol=1e-16)
    assert math.isclose(slope.item(), case.slope, rel_tol=1e-14, abs_tol=1e-16)


def test_table_has_every_estimator() -> None:
    assert set(KL_ESTIMATORS) == set(NAMES)


@pytest.mark.parametrize("drift", [20.0, 80.0, 89.0, 120.0])
def test_k3_stays_finite_in_float32_and_its_gradient_never_has_the_wrong_sign(drift: float) -> None:
    # exp overflows float32 at 88.7 (trl#3015, A03).
    for sign in (1, -1):
        delta = torch.tensor(sign * drift, requires_grad=True)
        kl = KL_ESTIMATORS["k3"](delta, 20.0)
        (slope,) = torch.autograd.grad(kl, delta)
        assert kl.isfinite()
        assert slope.isfinite()
        assert slope.item() * sign >= 0


def test_k3_is_untouched_inside_the_limit() -> None:
    delta = torch.linspace(-10, 10, 101, dtype=torch.float64)
    k3 = KL_ESTIMATORS["k3"]
    assert torch.equal(k3(delta, 20.0), k3(delta, None))


def test_k3_is_never_negative_for_small_differences() -> None:
    # exp(x) - x - 1 in float32 loses all digits near x = 1e-4, where the value is 5e-9.
    delta = torch.tensor([1e-4, -1e-4, 3e-4, -2e-5, 1e-6])
    kl = KL_ESTIMATORS["k3"](delta, 20.0)
    assert (kl >= 0).all()

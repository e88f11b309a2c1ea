"""Each policy term at, inside and outside its bound, for both signs of the advantage."""

import math
import sys

import pytest
import torch
from torch import Tensor

from by_hand import CLIP_BOUND_CASES, LN2, POLICY_CASES, PolicyCase
from ratio_kl.config import LOSS_TYPES, RatioKLConfig
from ratio_kl.objective.policy import POLICIES, PRESETS, beyond, cispo, clip, sapo, vespo, vespo_phi

TOLERANCE = 1e-14  # float64, a few roundings


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def term(config: RatioKLConfig, ratio: Tensor, advantage: Tensor, logp: Tensor) -> Tensor:
    if config.loss_type == "cispo":
        return cispo(ratio, advantage, logp, epsilon_high=config.upper_epsilon)
    if config.loss_type == "sapo":
        pos, neg = config.sapo_temperature_pos, config.sapo_temperature_neg
        return sapo(ratio, advantage, temperature_pos=pos, temperature_neg=neg)
    if config.loss_type == "vespo":
        phi = vespo_phi(
            ratio.log(),
            advantage,
            k_pos=config.vespo_k_pos,
            lambda_pos=config.vespo_lambda_pos,
            k_neg=config.vespo_k_neg,
            lambda_neg=config.vespo_lambda_neg,
        )
        return vespo(phi, advantage, logp)
    bounds = 1 - config.epsilon_low, 1 + config.upper_epsilon
    return clip(ratio, advantage, beyond(bounds, ratio, advantage), bounds, config.delta)


@pytest.mark.parametrize("case", [*POLICY_CASES, *CLIP_BOUND_CASES], ids=str)
def test_term_and_slope(case: PolicyCase) -> None:
    config = RatioKLConfig(**case.options)
    ratio = tensor(case.ratio).requires_grad_()
    logp = tensor(-LN2).requires_grad_()
    loss = term(config, ratio, tensor(case.advantage), logp)
    grads = torch.autograd.grad(loss, [ratio, logp], allow_unused=True, materialize_grads=True)
    # dr / dlogp = r.
    slope = grads[0].item() * case.ratio + grads[1].item()
    assert math.isclose(loss.item(), case.loss, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    assert math.isclose(slope, case.slope, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("delta", [None, 1e308])
def test_a_bound_beyond_float32_is_no_bound(loss_type: str, delta: float | None) -> None:
    """torch refuses such a number beside float32 tensors."""
    ratio, A = torch.tensor([0.5, 3.0, torch.inf]), torch.ones(3)
    logps = torch.full((3,), -LN2)
    options = {"loss_type": loss_type, "delta": delta if loss_type == "dapo" else None}
    largest = RatioKLConfig(**options, epsilon_high=sys.float_info.max)
    unbounded = RatioKLConfig(**options, epsilon_high=math.inf)
    assert torch.equal(term(largest, ratio, A, logps), term(unbounded, ratio, A, logps))


def test_no_term_reduces() -> None:
    ratio = torch.ones(2, 3, dtype=torch.float64)
    A, logps = torch.ones(2, 1, dtype=torch.float64), -ratio
    for loss_type in LOSS_TYPES:
        config = RatioKLConfig(loss_type=loss_type, epsilon_high=1.3, max_completion_length=8)
        assert term(config, ratio, A, logps).shape == (2, 3)


def test_clip_has_no_gradient_of_nan_where_the_other_branch_wins() -> None:
    # A huge ratio on the clipped side: loss -(1 + 0.28), gradient exactly 0 (trl#3015, A02).
    ratio = tensor(1e300).requires_grad_()
    bounds = 0.8, 1.28
    loss = clip(ratio, tensor(1.0), beyond(bounds, ratio, tensor(1.0)), bounds)
    assert loss.item() == -1.28
    assert torch.autograd.grad(loss, ratio)[0].item() == 0.0


PHI = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


@pytest.mark.parametrize(
    ("log_weight", "advantage", "expected"),
    [
        (0.0, 1.0, 1.0),  # exp(lambda - lambda)
        (0.0, -1.0, 1.0),
        (LN2, 1.0, 4 * math.exp(-3)),  # exp(3) 2^2 exp(-6)
        (LN2, 0.0, 4 * math.exp(-3)),  # 0 counts as positive
        (LN2, -1.0, 8 * math.exp(-2)),  # exp(2) 2^3 exp(-4)
        (-LN2, 1.0, 0.25 * math.exp(1.5)),
        (-LN2, -1.0, 0.125 * math.exp(1.0)),
        (-50.0, 1.0, 1e-16 * math.exp(3 - 3e-8)),  # w is at least 1e-8
        (50.0, 1.0, 0.0),  # w is at most e^20, and phi underflows
        (math.nan, 1.0, 0.0),
    ],
)
def test_vespo_phi(log_weight: float, advantage: float, expected: float) -> None:
    phi = vespo_phi(tensor(log_weight).requires_grad_(), tensor(advantage), **PHI)
    assert not phi.requires_grad
    # 1e-13: the exponent is near -34 at the lower limit, so its rounding counts 34 times.
    assert math.isclose(phi.item(), expected, rel_tol=1e-13)


def test_vespo_phi_limits_of_its_options() -> None:
    # lambda is at least 1e-4: with k = 0, w = 2, phi = exp(1e-4 - 2e-4).
    flat = vespo_phi(tensor(LN2), tensor(1.0), **(PHI | {"k_pos": 0.0, "lambda_pos": 0.0}))
    assert math.isclose(flat.item(), math.exp(-1e-4), rel_tol=1e-13)
    # exp(1000 - 1000 w) overflows for small w, and inf counts 0.
    over = vespo_phi(tensor(-10.0), tensor(1.0), **(PHI | {"lambda_pos": 1000.0}))
    assert over.item() == 0.0


def test_options_keep_the_precision_of_the_terms() -> None:
    # 1.05 and 1.9 are no float32 numbers: rounding an option to float32 is off by 1e-8.
    A, ratio = tensor(-1.0), tensor(2.0)
    got = sapo(ratio, A, temperature_pos=1.0, temperature_neg=1.05).item()
    assert math.isclose(got, 4 / 1.05 / (1 + math.exp(-1.05)), rel_tol=TOLERANCE)
    phi = vespo_phi(tensor(LN2), A, **(PHI | {"k_neg": 1.9, "lambda_neg": 1.1})).item()
    assert math.isclose(phi, math.exp(1.1 + 1.9 * LN2 - 2.2), rel_tol=TOLERANCE)


def test_tables_cover_every_loss_type() -> None:
    assert set(PRESETS) == set(LOSS_TYPES)
    assert {policy for policy, _ in PRESETS.values()} == set(POLICIES)

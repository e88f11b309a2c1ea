"""Metrics and per-token outputs of the module, by hand."""

import math

import pytest
import torch

from by_hand import LN2
from ratio_kl import FusedLinearRatioKLLoss, LossOutput, Metrics
from ratio_kl.config import LOSS_TYPES, RatioKLConfig
from support import problem, run

EYE = torch.eye(2, dtype=torch.float64)
TOLERANCE = 1e-12  # float64, a handful of roundings

# Ratios of the active tokens of three sequences, the last one empty.
RATIOS = torch.tensor([[0.5, 0.5, 1.5], [1.5, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
ADVANTAGES = torch.tensor([[-1.0, 1.0, -1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).double()


def call(advantages: torch.Tensor = ADVANTAGES, **options) -> LossOutput:
    """Tokens of probability 1 / 2: log-prob -log 2, entropy log 2."""
    hidden = torch.full((3, 3, 2), -LN2, dtype=torch.float64)
    ids = torch.zeros(3, 3, dtype=torch.int64)
    loss_fn = FusedLinearRatioKLLoss(process_group="local", **options)
    old, ref = -LN2 - RATIOS.log(), torch.full((3, 3), 0.5 - LN2, dtype=torch.float64)
    given = {"old_logps": old} | ({"ref_logps": ref} if options.get("beta") else {})
    return loss_fn(hidden, EYE, ids, MASK, advantages, **given)


def assert_metrics(metrics: Metrics, **expected: float) -> None:
    for name, value in expected.items():
        got = getattr(metrics, name).item()
        assert math.isclose(got, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), name


def test_token_level() -> None:
    # Ratios 0.5 (A < 0), 0.5 (A > 0), 1.5 (A < 0) and 1.5 (A > 0): one low, one high of four.
    k3 = math.exp(0.5) - 1.5
    out = call(beta=0.1, epsilon_high=0.4)
    assert_metrics(
        out.metrics,
        kl=k3,
        entropy=LN2,
        ratio_mean=1.0,
        clip_low=0.25,
        clip_high=0.25,
        clip_fraction=0.5,
        high_entropy_fraction=1.0,
        active_tokens=4,
        # Terms 0.8, -0.5, 1.5, -1.4 and KL, over four tokens.
        policy_loss=0.4 / 4 + 0.1 * k3,
    )
    corrected = call(beta=0.1, use_bias_correction_kl=True)
    assert_metrics(corrected.metrics, kl=k3 * 1.0)  # the mean ratio is 1
    torch.testing.assert_close(
        corrected.kl, torch.where(MASK, RATIOS * k3, 0), rtol=1e-12, atol=1e-12
    )


def test_outputs_are_neutral_on_inactive_tokens() -> None:
    out = call(beta=0.1)
    k3 = math.exp(0.5) - 1.5
    expected = {
        "logps": torch.where(MASK, -LN2, 0),
        "entropies": torch.where(MASK, LN2, 0),
        "ratio": torch.where(MASK, RATIOS, 1),
        "kl": torch.where(MASK, k3, 0),
    }
    for name, value in expected.items():
        got = getattr(out, name)
        assert not got.requires_grad
        torch.testing.assert_close(got, value.double(), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(got[~MASK], value.double()[~MASK], rtol=0, atol=0)
    low, high = torch.zeros(3, 3).bool(), torch.zeros(3, 3).bool()
    low[0, 0] = high[1, 0] = True
    assert torch.equal(out.low_clipped, low)
    assert torch.equal(out.high_clipped, high)
    assert out.phi is None


def test_sequence_level_counts_each_non_empty_sequence_once() -> None:
    # Mean log-ratios log(0.375) / 3 (A < 0) and log 1.5 (A > 0).
    advantages = torch.tensor([-1.0, 1.0, 1.0]).double()
    first = 0.375 ** (1 / 3)
    for level, mean, share in [
        ("sequence", (first + 1.5) / 2, (1 / 2, 1 / 2)),
        ("sequence_token", (3 * first + 1.5) / 4, (3 / 4, 1 / 4)),
    ]:
        for shape in ((3,), (3, 1), (3, 3)):
            spread = advantages if len(shape) == 1 else advantages[:, None].expand(shape)
            out = call(spread, importance_sampling_level=level)
            low, high = share
            assert_metrics(out.metrics, ratio_mean=mean, clip_low=low, clip_high=high)
            assert_metrics(out.metrics, clip_fraction=1.0, entropy=LN2)


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({"loss_type": "cispo", "epsilon_high": 1.4}, 0.0, 0.25),
        ({"loss_type": "cispo", "epsilon_high": 1.6}, 0.0, 0.0),
        ({"loss_type": "sapo"}, 0.0, 0.0),
        ({"loss_type": "vespo"}, 0.0, 0.0),
        ({"loss_type": "dapo", "delta": 1.1}, 0.25, 0.25),  # tested before the cap
        ({"loss_type": "dapo", "epsilon_low": 0.6, "epsilon_high": 0.6}, 0.0, 0.0),
    ],
)
def test_what_counts_as_clipped(options: dict, low: float, high: float) -> None:
    metrics = call(**options).metrics
    assert_metrics(metrics, clip_low=low, clip_high=high, clip_fraction=low + high)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("q", [0.5, 1.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_active_token(loss_type: str, level: str, q: float) -> None:
    # Every completion masked: loss and gradients 0 and never NaN (unsloth-zoo#1286, A06; A07).
    config = RatioKLConfig(
        loss_type=loss_type,
        importance_sampling_level="token" if loss_type == "vespo" else level,
        epsilon_high=1.3,
        max_completion_length=4,
        beta=0.1,
        entropy_coef=0.1,
        top_entropy_quantile=q,
    )
    loss_fn = FusedLinearRatioKLLoss(config, process_group="local")
    given = problem(0, config, B=2, T=3, V=11, bias=True)
    given = given.with_inputs(attention_mask=torch.zeros_like(given.active))
    for count in (None, 0, torch.tensor(0)):
        result = run(loss_fn, given.given(num_items_in_batch=count))
        assert result.loss.item() == 0
        assert all(value.item() == 0 for value in result.metrics.values())
        assert all(not grad.any() for grad in result.grads.values())


def test_metrics_are_detached_scalars() -> None:
    config = RatioKLConfig(beta=0.1, entropy_coef=0.1)
    given = problem(0, config)
    out = FusedLinearRatioKLLoss(config)(*given.inputs, **given.options)
    assert out.loss.requires_grad
    for value in out.metrics:
        assert value.dim() == 0
        assert not value.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_without_an_active_token_all_are_zero(level: str) -> None:
    config = RatioKLConfig(importance_sampling_level=level, beta=0.1)
    given = problem(8, config)
    given = given.with_inputs(attention_mask=torch.zeros_like(given.inputs[3]))
    out = FusedLinearRatioKLLoss(config)(*given.inputs, **given.options)
    assert {name: value.item() for name, value in out.metrics._asdict().items()} == dict.fromkeys(
        out.metrics._fields, 0
    )

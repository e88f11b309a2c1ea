"""Faults that users of such losses have met: non-finite values, masks and empty batches."""

import math

import pytest
import torch
from torch import Tensor

from ratio_kl import linear_logprob
from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES, RatioKLConfig
from support import Problem, assert_same, module, problem, run

FLOAT32 = 1e-6  # about 10 roundings of float32


def config_of(loss_type: str, **options) -> RatioKLConfig:
    high = 1.3 if loss_type == "cispo" else None
    return RatioKLConfig(loss_type=loss_type, epsilon_high=high, max_completion_length=4, **options)


def small(config: RatioKLConfig, mask: Tensor, **options) -> Problem:
    """B=2, T=4, H=16, V=64 in float32, the size of the reports."""
    made = problem(1, config, B=2, T=4, H=16, V=64, dtype=torch.float32, poison=False, **options)
    return made.with_inputs(attention_mask=mask)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("old", "ref"),
    [(-200, 200), (-math.inf, -math.inf), (math.inf, math.inf), (math.nan, math.nan)],
)
def test_a01_padding_is_selected_away_before_exp(loss_type: str, old: float, ref: float) -> None:
    """One padded token with a silly old/ref value makes the loss NaN (NVIDIA-NeMo/RL#4120)."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    config = config_of(loss_type, beta=0.1, top_entropy_quantile=0.8, entropy_coef=0.01)
    clean = small(config, mask, bias=True, advantages="token", sampling_ratio="token")

    def padded(value: Tensor, filling: float) -> Tensor:
        where = mask.bool().view(2, 4, *[1] * (value.dim() - 2))
        return torch.where(where, value.detach(), filling).requires_grad_(value.requires_grad)

    def filled(old: float, ref: float, junk: float) -> Problem:
        made = clean.with_inputs(
            hidden=padded(clean.hidden, junk), advantages=padded(clean.inputs[4], junk)
        )
        return made.given(
            old_logps=padded(clean.options["old_logps"], old),
            ref_logps=padded(clean.options["ref_logps"], ref),
            sampling_ratio=padded(clean.options["sampling_ratio"], junk),
        )

    expected = run(module(config), filled(0, 0, 0))
    actual = run(module(config), filled(old, ref, math.nan))
    assert actual.loss.isfinite()
    assert_same(actual, expected, 0.0)
    assert not actual.grads["hidden"][mask == 0].any()
    assert actual.grads["hidden"][mask == 1].any()


def one_token(config: RatioKLConfig, advantage: float, **shift: float):
    """One active token whose old or reference log-prob lies `shift` from its own."""
    hidden = torch.randn(1, 1, 16).requires_grad_()
    weight = torch.randn(64, 16).requires_grad_()
    ids, mask, A = torch.tensor([[3]]), torch.tensor([[1]]), torch.tensor([advantage])
    logps = linear_logprob(hidden, weight, ids).logps.detach()
    given = {name: logps + by for name, by in shift.items()}
    out = module(config)(hidden, weight, ids, mask, A, **given)
    out.loss.backward()
    return out, hidden.grad, weight.grad


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "luspo"])
def test_a02_no_gradient_from_the_branch_that_min_left(loss_type: str) -> None:
    """Loss finite, grad_norm NaN: 0 * inf in the branch not taken (MakazhanAlpamys/Soup#1084)."""
    out, d_hidden, d_weight = one_token(config_of(loss_type), 1.0, old_logps=-200.0)
    assert out.loss.item() == pytest.approx(-1.2, rel=FLOAT32)
    assert torch.equal(d_hidden, torch.zeros_like(d_hidden))
    assert torch.equal(d_weight, torch.zeros_like(d_weight))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "luspo"])
def test_a02_an_infinite_ratio_that_wins_is_large_and_finite(loss_type: str) -> None:
    """The mirror of MakazhanAlpamys/Soup#1084: A = -1, the ratio is bounded by exp(20)."""
    out, d_hidden, d_weight = one_token(config_of(loss_type), -1.0, old_logps=-200.0)
    assert out.loss.item() == pytest.approx(math.exp(20), rel=FLOAT32)
    assert out.ratio.item() == pytest.approx(math.exp(20), rel=FLOAT32)
    # Beyond the limit the clamped ratio is constant.
    assert not d_hidden.any()
    assert not d_weight.any()


@pytest.mark.parametrize("limit", [100.0, None])
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", sorted(set(LOSS_TYPES) - {"vespo"}))
def test_a02_an_infinite_ratio_that_loses(loss_type: str, level: str, limit: float | None) -> None:
    """MakazhanAlpamys/Soup#1084 for those who switch the limit off: float32 ends at exp(88.7).

    Every policy term is bounded for A = 1, and only cispo's has a slope there.
    """
    config = config_of(loss_type, importance_sampling_level=level, log_ratio_limit=limit)
    out, d_hidden, d_weight = one_token(config, 1.0, old_logps=-200.0)
    assert out.ratio.item() == math.inf
    term = {"cispo": -1.3 * out.logps.item(), "sapo": -4.0}.get(loss_type, -1.2)
    length = 4 if loss_type == "dr_grpo" else 1
    assert out.loss.item() == pytest.approx(term / length, rel=FLOAT32)
    for grad in (d_hidden, d_weight):
        assert grad.isfinite().all()
        assert grad.any() == (loss_type == "cispo")


@pytest.mark.parametrize("limit", [100.0, None])
@pytest.mark.parametrize("advantage", [-1.0, 0.0])
def test_a02_an_infinite_ratio_that_wins_shows(advantage: float, limit: float | None) -> None:
    """The mirror without a limit: inf, and inf * 0 in a group whose rewards are all alike."""
    out, _, _ = one_token(config_of("grpo", log_ratio_limit=limit), advantage, old_logps=-200.0)
    assert out.loss.isnan() if advantage == 0 else out.loss.item() == math.inf


@pytest.mark.parametrize("delta", [20, 80, 89, 120])
def test_a03_k3_is_bounded_where_policy_and_reference_drift(delta: float) -> None:
    """k3 becomes inf when policy and reference drift apart (huggingface/trl#3015)."""
    config = config_of("grpo", beta=0.1)
    out, d_hidden, _ = one_token(config, 0.0, ref_logps=float(delta))
    bounded = math.exp(20) - 20 - 1
    # logp + 20 - logp is off from 20 by a few float32 roundings of 20, which exp multiplies.
    assert out.loss.item() == pytest.approx(0.1 * bounded, rel=1e-5)
    assert out.kl.item() == pytest.approx(bounded, rel=1e-5)
    assert d_hidden.isfinite().all()


@pytest.mark.parametrize("delta", [-9.9, -1.0, -1e-3, 0.0, 1e-3, 1.0, 9.9])
def test_a03_the_bound_changes_nothing_for_ordinary_drift(delta: float) -> None:
    """The clamp against huggingface/trl#3015 must not be felt below it."""
    bounded, unbounded = (
        config_of("grpo", beta=0.1, log_ratio_limit=limit) for limit in (20.0, None)
    )
    mask = torch.ones(2, 4)
    given = small(bounded, mask)
    logps = run(module(bounded), given).outputs["logps"]
    given = given.given(old_logps=logps, ref_logps=logps + delta)
    outcome = run(module(bounded), given)
    assert_same(outcome, run(module(unbounded), given), 0.0)
    expected = math.exp(delta) - delta - 1
    # logp is near -5: delta carries 5e-7 of rounding, times the slope of k3.
    error = (outcome.outputs["kl"].double() - expected).abs().max().item()
    assert error <= 1e-6 * max(abs(math.expm1(delta)), expected)


V_OF_TILES = 4 * 64 + 3  # four whole tiles of the smallest size, and a short one


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
@pytest.mark.parametrize("finite", [0, 30, 63, 64, 130, 255, 256, 258])
def test_a04_whole_tiles_at_minus_infinity(finite: int, chunk_bytes: int) -> None:
    """NaN when most logits are -inf, by where the finite one is (flash-attention#1930)."""
    hidden = torch.randn(3, 8).requires_grad_()
    weight = torch.randn(V_OF_TILES, 8).requires_grad_()
    bias = torch.full((V_OF_TILES,), -math.inf)
    bias[finite] = 10.0
    bias.requires_grad_()
    ids = torch.full((3,), finite)
    out = linear_logprob(
        hidden, weight, ids, bias=bias, return_entropy=True, chunk_bytes=chunk_bytes
    )
    assert torch.equal(out.logps, torch.zeros(3))
    assert torch.equal(out.entropies, torch.zeros(3))
    (out.logps.sum() + out.entropies.sum()).backward()
    # The distribution cannot move: p is 1 in one place whatever the logit there is.
    for leaf in (hidden, weight, bias):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
def test_a04_tiles_at_minus_infinity_beside_finite_ones(chunk_bytes: int) -> None:
    """flash-attention#1930 with a distribution that is not degenerate."""
    hidden = torch.randn(3, 8, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V_OF_TILES, 8, dtype=torch.float64).requires_grad_()
    bias = torch.full((V_OF_TILES,), -math.inf, dtype=torch.float64)
    finite = [130, 131, 150, 258]
    bias[finite] = 0.0
    ids = torch.tensor([130, 150, 258])
    out = linear_logprob(
        hidden, weight, ids, bias=bias, return_entropy=True, chunk_bytes=chunk_bytes
    )
    exact = torch.distributions.Categorical(logits=hidden @ weight[finite].T)
    expected = exact.log_prob(torch.tensor([0, 2, 3])), exact.entropy()
    torch.testing.assert_close((out.logps, out.entropies), expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(out.logps.sum() + 0.3 * out.entropies.sum(), [hidden, weight])
    theirs = torch.autograd.grad(expected[0].sum() + 0.3 * expected[1].sum(), [hidden, weight])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not ours[1][bias == -math.inf].any()


@pytest.mark.parametrize(
    ("logits", "dtype", "expected"),
    [
        ([0, -math.inf], torch.float32, 0.0),
        ([0, 0, -math.inf], torch.float32, math.log(2)),
        ([65504, -65504], torch.float16, 0.0),
    ],
)
def test_a05_entropy_of_impossible_tokens(logits, dtype, expected: float) -> None:
    """Entropy NaN with a zero-probability token (huggingface/trl#7221, #7252)."""
    V = len(logits)
    hidden = torch.ones(1, 1, dtype=dtype).requires_grad_()
    if math.inf in map(abs, logits):
        weight, bias = torch.randn(V, 1, dtype=dtype).mul(0), torch.tensor(logits)
    else:
        weight, bias = torch.tensor(logits, dtype=dtype)[:, None], torch.zeros(V)
    weight.requires_grad_()
    bias = bias.float().requires_grad_()
    out = linear_logprob(hidden, weight, torch.tensor([0]), bias=bias, return_entropy=True)
    assert out.entropies.item() == pytest.approx(expected, rel=FLOAT32, abs=0)
    out.entropies.sum().backward()
    for leaf in (hidden, weight, bias):
        assert leaf.grad.isfinite().all()
        assert leaf.grad.abs().max() <= 1e-6  # the uniform distribution is the maximum


def no_token(config: RatioKLConfig, **options) -> Problem:
    mask = torch.zeros(2, 4)
    return small(config, mask, bias=True, sampling_ratio="token").given(**options)


@pytest.mark.parametrize("items", [torch.tensor(0), torch.tensor(0.0), 0, None])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a06_every_completion_masked(loss_type: str, items) -> None:
    """Every completion masked: 0/0 for dapo, cispo and vespo (unslothai/unsloth-zoo#1286)."""
    config = config_of(loss_type, beta=0.1, top_entropy_quantile=0.5, entropy_coef=0.1)
    given = no_token(config, num_items_in_batch=items)
    out = module(config)(*given.inputs, **given.options)
    assert out.loss.grad_fn is not None
    result = run(module(config), given)
    assert torch.equal(result.loss, torch.zeros(()))
    for grad in result.grads.values():
        assert torch.equal(grad, torch.zeros_like(grad))
    for name, metric in result.metrics.items():
        assert metric == 0, name


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_a07_a_fully_masked_micro_batch_can_be_differentiated(level: str) -> None:
    """A fully masked micro-batch gives a loss without a graph (huggingface/trl#7077)."""
    config = config_of("dapo", importance_sampling_level=level)
    given = no_token(config)
    module(config)(*given.inputs, **given.options).loss.backward()
    for name, leaf in given.leaves.items():
        assert leaf.grad is not None, name
        assert torch.equal(leaf.grad, torch.zeros_like(leaf)), name


def test_a08_only_the_mask_says_what_is_padding() -> None:
    """The true EOS token vanishes from the loss where pad == eos (huggingface/trl#4970)."""
    config = config_of("dapo")
    eos = 7
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    given = small(config, mask)
    ids = given.inputs[2].clone()
    ids[0, 2:], ids[1, 1:] = eos, eos
    result = run(module(config), given.with_inputs(action_ids=ids).given(old_logps=None))
    for row, column in ((0, 2), (1, 1)):
        assert result.grads["hidden"][row, column].abs().max() > 1e-3
    assert not result.grads["hidden"][mask == 0].any()

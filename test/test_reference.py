"""The oracle against numbers worked out by hand.

Tokens of a known log-prob come from a head of two columns: with weight = identity and
hidden = (log p, log(1 - p)) the logits are log-probabilities already.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from by_hand import KL_CASES, LN2, POLICY_CASES, REDUCED, REDUCED_MASK, REDUCED_TERMS, PolicyCase
from ratio_kl.config import LOSS_TYPES, RatioKLConfig
from ratio_kl.reference import ReferenceOutput, reference_logprob, reference_loss
from support import assert_same, problem, relative_error, run_reference

EYE = torch.eye(2, dtype=torch.float64)
TOLERANCE = 1e-12  # float64, a handful of roundings of numbers near 1


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def hidden_of(p: Tensor) -> Tensor:
    """[..., 2] hidden states whose action 0 has probability p under the weight EYE."""
    return torch.stack([p.log(), (-p).log1p()], -1)


def loss_of(options: dict, p: object, advantages: object, mask=None, **given) -> ReferenceOutput:
    """The oracle on tokens [B, T] of probability p; ratio 1 unless old_logps is given."""
    p = tensor(p)
    mask = torch.ones_like(p) if mask is None else tensor(mask)
    ids = torch.zeros_like(p, dtype=torch.int64)
    config = RatioKLConfig(**options)
    hidden = given.pop("hidden", hidden_of(p))
    return reference_loss(config, hidden, EYE, ids, mask, tensor(advantages), **given)


def slope(loss: Tensor, hidden: Tensor) -> float:
    """dloss / dlogp of a token with p = 0.5, where dlogp / dhidden = (0.5, -0.5)."""
    (grad,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(grad[..., 0], -grad[..., 1], rtol=TOLERANCE, atol=TOLERANCE)
    return grad[..., 0].item() / 0.5


def close(actual: Tensor, expected: float) -> bool:
    return math.isclose(actual.item(), expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@pytest.mark.parametrize("case", POLICY_CASES, ids=str)
def test_policy_term(case: PolicyCase) -> None:
    hidden = hidden_of(tensor([[0.5]])).requires_grad_()
    old = tensor([[-LN2 - math.log(case.ratio)]])
    if case.ratio == 1:  # exactly at the bound
        old = reference_logprob(hidden, EYE, torch.tensor([[0]]))[0].detach()
    out = loss_of(case.options, [[0.5]], [case.advantage], hidden=hidden, old_logps=old)
    assert close(out.ratio, case.ratio)
    assert close(out.loss.detach(), case.loss)
    assert math.isclose(slope(out.loss, hidden), case.slope, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("case", KL_CASES, ids=str)
def test_kl(case) -> None:
    options = {
        "beta": 1.0,
        "kl_estimator": case.estimator,
        "log_ratio_limit": case.limit,
        "loss_type": "grpo",
    }
    hidden = hidden_of(tensor([[0.5]])).requires_grad_()
    out = loss_of(options, [[0.5]], [0.0], hidden=hidden, ref_logps=tensor([[case.delta - LN2]]))
    assert close(out.kl, case.kl)
    assert close(out.loss.detach(), case.kl)
    # delta = ref - logp, so the slope in logp is the negative one.
    assert math.isclose(slope(out.loss, hidden), -case.slope, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("delta", [None, 1.5])
def test_kl_bias_correction_has_the_gradient_of_the_ratio(delta: float | None) -> None:
    # r = 2 (before the delta cap), k3(0.5) = 0.14872; d(r k3)/dlogp = r (k3 - (e^0.5 - 1)) = -1.
    options = {"loss_type": "grpo", "beta": 1.0, "use_bias_correction_kl": True, "delta": delta}
    hidden = hidden_of(tensor([[0.5]])).requires_grad_()
    given = {"old_logps": tensor([[-2 * LN2]]), "ref_logps": tensor([[0.5 - LN2]])}
    out = loss_of(options, [[0.5]], [0.0], hidden=hidden, **given)
    assert close(out.kl, 2 * 0.14872127070012815)
    assert close(out.metrics["kl"], 2 * 0.14872127070012815)
    assert math.isclose(slope(out.loss, hidden), -1.0, rel_tol=TOLERANCE)


def test_levels() -> None:
    # Log-ratios 0.3 and -0.1, and an inactive one: mean 0.1 over the two.
    old = tensor([[-LN2 - 0.3, -LN2 + 0.1, 1e4]])
    for level, expected in {
        "token": [math.exp(0.3), math.exp(-0.1), 1.0],
        "sequence": [math.exp(0.1), math.exp(0.1), 1.0],
        "sequence_token": [math.exp(0.1), math.exp(0.1), 1.0],
    }.items():
        options = {"importance_sampling_level": level}
        out = loss_of(options, [[0.5, 0.5, 0.5]], [1.0], [[1, 1, 0]], old_logps=old)
        torch.testing.assert_close(out.ratio, tensor([expected]), rtol=1e-12, atol=0)
        mean = sum(expected[:2]) / 2
        assert close(out.metrics["ratio_mean"], mean)


def test_gradients_of_levels() -> None:
    # A = 2 on the first token alone, both inside the clip: l = -2 exp(w) on that token, weight 1/2.
    # token, sequence_token: d/dlogp = (-r, 0); sequence: w is a mean of two, so (-r / 2, -r / 2).
    old, A = tensor([[-LN2 - 0.1, -LN2 + 0.06]]), [[2.0, 0.0]]
    mean, own = math.exp(0.02), math.exp(0.1)
    for level, expected in {
        "token": [-own, 0.0],
        "sequence": [-mean / 2, -mean / 2],
        "sequence_token": [-mean, 0.0],
    }.items():
        hidden = hidden_of(tensor([[0.5, 0.5]])).requires_grad_()
        options = {"importance_sampling_level": level, "loss_type": "grpo"}
        out = loss_of(options, [[0.5, 0.5]], A, hidden=hidden, old_logps=old)
        (grad,) = torch.autograd.grad(out.loss, hidden)
        torch.testing.assert_close(grad[0, :, 0] / 0.5, tensor(expected), rtol=1e-12, atol=1e-12)


def test_log_ratio_limit_clamps_the_ratio_and_stops_its_gradient() -> None:
    hidden = hidden_of(tensor([[0.5]])).requires_grad_()
    old = tensor([[-LN2 - 3.0]])
    out = loss_of({"log_ratio_limit": 2.0}, [[0.5]], [-1.0], hidden=hidden, old_logps=old)
    assert close(out.ratio, math.exp(2.0))
    assert close(out.loss.detach(), math.exp(2.0))
    assert slope(out.loss, hidden) == 0.0
    free = loss_of({"log_ratio_limit": None}, [[0.5]], [-1.0], old_logps=old)
    assert close(free.ratio, math.exp(3.0))


SIGN = {"cispo": 1, "vespo": 1}  # -A logp = A; the others are -A


def reduced(loss_type: str, **given) -> float:
    # Every term is |A|: ratio 1, log-prob -1, and sapo's gate is 1 / 2 * 4 / 2.
    options = {
        "loss_type": loss_type,
        "epsilon_high": 1.5,
        "max_completion_length": 5,
        "sapo_temperature_pos": 2.0,
        "sapo_temperature_neg": 2.0,
    }
    p = [[math.exp(-1)] * 3] * 3
    advantages = (SIGN.get(loss_type, -1) * tensor(REDUCED_TERMS)).tolist()
    return loss_of(options, p, advantages, REDUCED_MASK, **given).loss.item()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reduction(loss_type: str) -> None:
    expected = REDUCED[loss_type]
    by_items = loss_type in ("dapo", "cispo", "vespo")
    assert math.isclose(reduced(loss_type), expected, rel_tol=TOLERANCE)
    halved = reduced(loss_type, gradient_accumulation_steps=2)
    assert math.isclose(halved, expected / 2, rel_tol=TOLERANCE)
    # A count over the whole optimizer step replaces the normaliser and the division by steps.
    for count in (26, torch.tensor(26)):
        counted = reduced(loss_type, num_items_in_batch=count, gradient_accumulation_steps=2)
        expected_counted = 13 / 26 if by_items else expected / 2
        assert math.isclose(counted, expected_counted, rel_tol=TOLERANCE)
    # Two ranks with 10 tokens together: averaged gradients must come out as one sum.
    shared = reduced(loss_type, world_size=2, world_tokens=10)
    assert math.isclose(shared, 2 * 13 / 10 if by_items else expected, rel_tol=TOLERANCE)


def test_sampling_ratio_weights_the_policy_term_and_not_the_kl() -> None:
    # Term -A = -1 weighted by 0.01; KL k3(0.5) with beta 0.1 untouched.
    options = {"beta": 0.1}
    expected = -0.01 + 0.1 * 0.14872127070012815
    for ratio in ([0.01], [[0.01]], [[0.01, 0.01]]):
        out = loss_of(
            options,
            [[0.5, 0.5]],
            [1.0],
            sampling_ratio=tensor(ratio),
            ref_logps=tensor([[0.5 - LN2] * 2]),
        )
        assert close(out.loss, expected)


def test_vespo_folds_the_sampling_ratio_into_its_weight() -> None:
    # Log-ratios log 2 and -log 4 and an inactive token: w = 1/2. phi(w) = exp(3 + 2 log w - 3 w).
    old = tensor([[-2 * LN2, LN2, 5.0]])
    mask, p = [[1, 1, 0]], [[0.5] * 3]

    def phi(w: float) -> float:
        return math.exp(3 + 2 * math.log(w) - 3 * w)

    cases = [
        (None, phi(0.5)),
        (tensor([[2.0, 0.5, 9.0]]), phi(0.5)),  # 2 * 0.5 = 1; the inactive 9 is out
        (tensor([[2.0, 2.0, 9.0]]), phi(2.0)),  # per token: 4 times
        (tensor([2.0]), phi(1.0)),  # per sequence: once
        (tensor([[2.0]]), phi(1.0)),
        (tensor([0.0]), phi(1e-8)),  # log 0 is raised to log 1e-8, and so is the sum
    ]
    for ratio, expected in cases:
        given = {} if ratio is None else {"sampling_ratio": ratio}
        out = loss_of({"loss_type": "vespo"}, p, [1.0], mask, old_logps=old, **given)
        torch.testing.assert_close(out.phi, tensor([[expected, expected, 1.0]]), rtol=1e-12, atol=0)
        assert close(out.loss, expected * LN2)


def test_off_policy_mask() -> None:
    # Mean gaps (mu - logp): 0.25 kept, 0.35 dropped, 0.35 with A > 0 kept, (nan, 0.5) counts 0.25.
    p = [[0.5, 0.5]] * 4
    mu = -LN2 + tensor([[0.1, 0.4], [0.3, 0.4], [0.3, 0.4], [math.nan, 0.5]])
    A = [-1.0, -2.0, 4.0, -8.0]
    options = {"loss_type": "luspo", "off_policy_mask_threshold": 0.3}
    out = loss_of(options, p, A, sampling_logps=mu)
    # Two tokens a sequence, term -A, weight 1 / 4: the second sequence is gone.
    assert close(out.loss, 2 * (1 - 4 + 8) / 4)
    # Per-token advantages: only the negative one of a far sequence goes.
    out = loss_of(options, p[:1], [[-1.0, 3.0]], sampling_logps=mu[1:2])
    assert close(out.loss, -3.0)
    # Without sampling_logps the old log-probs stand in, and without those nothing is far.
    out = loss_of(options, p[:1], [-1.0], old_logps=mu[1:2])
    assert close(out.loss, 0.0)
    out = loss_of(options, p[:1], [-1.0])
    assert close(out.loss, 2.0)


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


# Entropies of p = 0.95, 0.9, 0.8, 0.8, 0.5 rise in this order, with a tie in the middle.
P = [0.95, 0.9, 0.8, 0.8, 0.5]


@pytest.mark.parametrize(
    ("q", "kept"),
    [
        (1.0, [1, 1, 1, 1, 1]),
        (0.8, [0, 1, 1, 1, 1]),  # rank 0.2 * 4 = 0.8: between the first two
        (0.4, [0, 0, 1, 1, 1]),  # rank 2.4: between the tied ones, both kept
        (0.2, [0, 0, 0, 0, 1]),  # rank 3.2
        (0.0, [0, 0, 0, 0, 1]),
    ],
)
def test_entropy_mask(q: float, kept: list[int]) -> None:
    # Terms -A = 1, 2, 4, 8, 16 in one sequence of five, plus an inactive token of high entropy.
    A = [[-1.0, -2.0, -4.0, -8.0, -16.0, -99.0]]
    mask = [[1, 1, 1, 1, 1, 0]]
    out = loss_of({"top_entropy_quantile": q}, [[*P, 0.5]], A, mask)
    # The denominator stays 5.
    assert close(out.loss, sum(k * 2**i for i, k in enumerate(kept)) / 5)
    assert close(out.metrics["high_entropy_fraction"], sum(kept) / 5)
    assert close(out.metrics["entropy"], sum(map(binary_entropy, P)) / 5)


def test_entropy_mask_is_global_over_ranks() -> None:
    # Rank 0 holds the two lowest entropies, rank 1 the two highest; q = 0.5 keeps rank 1's only,
    # while each rank's own quantile would keep one on each.
    low, high = [[0.95, 0.9]], [[0.7, 0.5]]
    options = {"top_entropy_quantile": 0.5}
    entropies = {
        name: loss_of({}, p, [1.0]).entropies.flatten()
        for name, p in {"low": low, "high": high}.items()
    }
    on_low = loss_of(options, low, [1.0], other_entropies=entropies["high"])
    on_high = loss_of(options, high, [1.0], other_entropies=entropies["low"])
    assert close(on_low.metrics["high_entropy_fraction"], 0.0)
    assert close(on_high.metrics["high_entropy_fraction"], 1.0)
    assert close(loss_of(options, low, [1.0]).metrics["high_entropy_fraction"], 0.5)


def test_nan_entropy_makes_the_loss_nan_also_on_other_ranks() -> None:
    nan = tensor([math.nan])
    out = loss_of({"top_entropy_quantile": 0.5}, [[0.5, 0.9]], [1.0], other_entropies=nan)
    assert math.isnan(out.loss.item())
    empty = loss_of(
        {"top_entropy_quantile": 0.5}, [[0.5, 0.9]], [1.0], [[0, 0]], other_entropies=nan
    )
    assert math.isnan(empty.loss.item())


def test_entropy_bonus() -> None:
    # H(0.5) = log 2 and H(0.9) = 0.32508; A = 0 leaves the bonus alone.
    both = (LN2 + 0.3250829733914482) / 2
    p, A = [[0.5, 0.9]], [0.0]
    for loss_type in LOSS_TYPES:
        options = {
            "loss_type": loss_type,
            "entropy_coef": 0.1,
            "epsilon_high": 1.5,
            "max_completion_length": 7,
        }
        assert close(loss_of(options, p, A).loss, -0.1 * both)
        assert close(loss_of(options, p, A, entropy_coef=-0.2).loss, 0.2 * both)
        counted = loss_of(options, p, A, num_items_in_batch=50, gradient_accumulation_steps=2)
        assert close(counted.loss, -0.05 * both)
        masked = loss_of(options | {"top_entropy_quantile": 0.0}, p, A)
        assert close(masked.loss, -0.1 * LN2)
        assert close(masked.metrics["policy_loss"], 0.0)


def test_clip_metrics() -> None:
    # Ratios 0.5, 0.5, 1.5, 1.5, 1 with advantages -, +, -, +, 0: one low and one high of five.
    old = -LN2 - tensor([[0.5, 0.5, 1.5, 1.5, 1.0]]).log()
    A = [[-1.0, 1.0, -1.0, 1.0, 0.0]]
    p = [[0.5] * 5]
    for loss_type, low, high in [("dapo", 0.2, 0.2), ("cispo", 0.0, 0.2), ("sapo", 0.0, 0.0)]:
        options = {"loss_type": loss_type, "epsilon_high": 0.4 if loss_type == "dapo" else 1.4}
        out = loss_of(options, p, A, old_logps=old)
        assert close(out.metrics["clip_low"], low)
        assert close(out.metrics["clip_high"], high)
        assert close(out.metrics["clip_fraction"], low + high)
        assert out.low_clipped.tolist() == [[low > 0, False, False, False, False]]
        assert out.high_clipped.tolist() == [[False, False, False, high > 0, False]]
    # The test is on the ratio before the delta cap.
    capped = loss_of({"epsilon_high": 0.4, "delta": 1.1}, p, A, old_logps=old)
    assert close(capped.metrics["clip_high"], 0.2)


def test_sequence_level_metrics_count_each_non_empty_sequence_once() -> None:
    # Ratios 2 (A > 0, one token), 1 (three tokens), and an empty sequence.
    options = {"importance_sampling_level": "sequence"}
    old = tensor([[-2 * LN2] * 3, [-LN2] * 3, [5.0] * 3])
    out = loss_of(options, [[0.5] * 3] * 3, [1.0, 1.0, 1.0], REDUCED_MASK, old_logps=old)
    assert close(out.metrics["ratio_mean"], 1.5)
    assert close(out.metrics["clip_high"], 0.5)
    assert out.metrics["active_tokens"].item() == 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_active_token(loss_type: str) -> None:
    config = RatioKLConfig(
        loss_type=loss_type,
        epsilon_high=1.3,
        max_completion_length=4,
        beta=0.1,
        entropy_coef=0.1,
        top_entropy_quantile=0.5,
    )
    given = problem(0, config, B=2, T=3, V=11, bias=True)
    given = given.with_inputs(attention_mask=torch.zeros_like(given.active))
    for count in (None, 0, torch.tensor(0)):
        result = run_reference(config, given.given(num_items_in_batch=count))
        assert result.loss.item() == 0
        assert all(value.item() == 0 for value in result.metrics.values())
        assert all(not grad.any() for grad in result.grads.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_inactive_places_change_nothing(loss_type: str) -> None:
    config = RatioKLConfig(loss_type=loss_type, epsilon_high=1.3, max_completion_length=4, beta=0.1)
    options = {"bias": True, "advantages": "token", "sampling_ratio": "token"}
    spoilt = run_reference(config, problem(3, config, poison=True, **options))
    clean = run_reference(config, problem(3, config, poison=False, **options))
    assert_same(spoilt, clean, 0.0)


def test_logprob_against_categorical() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(11, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, 9, (3, 4), generator=generator)
    tau = tensor([0.5, 1.0, 2.0])
    ours = reference_logprob(
        hidden, weight, ids, bias=bias, temperature=tau, logit_scale=1.5, softcap=2.0, vocab_size=9
    )
    logits = 2.0 * torch.tanh((hidden @ weight.T + bias)[..., :9] * 1.5 / 2.0) / tau[:, None, None]
    theirs = Categorical(logits=logits)
    expected = theirs.log_prob(ids), theirs.entropy()
    for mine, wanted in zip(ours, expected, strict=True):
        assert relative_error(mine, wanted) < TOLERANCE
        leaves = [hidden, weight, bias]
        grads = torch.autograd.grad(mine.sum(), leaves, retain_graph=True)
        wanted_grads = torch.autograd.grad(wanted.sum(), leaves, retain_graph=True)
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            assert relative_error(grad, wanted_grad) < TOLERANCE


def test_impossible_columns_have_no_entropy_and_finite_gradients() -> None:
    # Logits [0, -inf] and [0, 0, -inf], made by the bias: entropies 0 and log 2.
    for logits, expected in (([0.0, -math.inf], 0.0), ([0.0, 0.0, -math.inf], LN2)):
        hidden = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
        weight = torch.ones(len(logits), 2, dtype=torch.float64, requires_grad=True)
        _, entropies = reference_logprob(hidden, weight, torch.tensor([0]), bias=tensor(logits))
        assert close(entropies.detach(), expected)
        for grad in torch.autograd.grad(entropies.sum(), [hidden, weight]):
            assert grad.isfinite().all()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_packed_equals_padded(level: str) -> None:
    config = RatioKLConfig(beta=0.1, importance_sampling_level=level, top_entropy_quantile=0.5)
    given = problem(7, config, bias=True, sampling_ratio="sequence", poison=False)
    padded = run_reference(config, given)
    mask = given.active
    hidden, weight, ids, _, advantages = given.inputs
    keep = {"bias": given.options["bias"], "sampling_ratio": given.options["sampling_ratio"]}
    rows = {name: given.options[name][mask] for name in ("old_logps", "ref_logps")}
    packed = reference_loss(
        config,
        hidden[mask],
        weight,
        ids[mask],
        torch.ones_like(ids[mask]),
        advantages,
        cu_seqlens=torch.cat([torch.zeros(1).long(), mask.sum(1).cumsum(0)]),
        **keep,
        **rows,
    )
    assert relative_error(packed.loss, padded.loss) < TOLERANCE
    grads = torch.autograd.grad(packed.loss, [*given.leaves.values()])
    for name, grad in zip(given.leaves, grads, strict=True):
        assert relative_error(grad, padded.grads[name]) < TOLERANCE
    for name in ("logps", "entropies", "ratio", "kl"):
        assert relative_error(getattr(packed, name), padded.outputs[name][mask]) < TOLERANCE

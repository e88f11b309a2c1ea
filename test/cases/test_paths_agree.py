"""Faults that users of such losses have met: the fused and the plain path disagree."""

import math
from dataclasses import fields

import pytest
import torch

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES, RatioKLConfig
from ratio_kl.reference import reference_logprob
from support import Problem, assert_close, problem, run

FLOAT64 = 1e-12


def config_of(loss_type: str, **options) -> RatioKLConfig:
    options.setdefault("epsilon_high", 1.3 if loss_type == "cispo" else 0.28)
    options.setdefault("max_completion_length", 17)
    return RatioKLConfig(loss_type=loss_type, **options)


def module(config: RatioKLConfig) -> FusedLinearRatioKLLoss:
    return FusedLinearRatioKLLoss(config, process_group="local")


def on_policy(given: Problem, **inputs) -> Problem:
    return given.with_inputs(**inputs).given(old_logps=None)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 16)])
@pytest.mark.parametrize("loss_type", sorted(set(LOSS_TYPES) - {"vespo"}))
def test_a22_rollout_weights_reach_the_policy_term(loss_type: str, shape) -> None:
    """grad_norm about 100 times too large with rollouts of another engine (Liger-Kernel#1082)."""
    config = config_of(loss_type)
    given = problem(1, config, poison=False).with_inputs(advantages=torch.ones(6).double())
    plain = run(module(config), given)
    weighted = run(
        module(config), given.given(sampling_ratio=torch.full(shape, 0.01, dtype=torch.float64))
    )
    assert_close(weighted.loss, 0.01 * plain.loss, FLOAT64, "loss")
    for name, grad in weighted.grads.items():
        assert_close(grad, 0.01 * plain.grads[name], FLOAT64, name)


def test_a22_rollout_weights_do_not_reach_the_kl() -> None:
    """linkedin/Liger-Kernel#1082: the weight comes before the KL term."""
    config = config_of("grpo", beta=0.3)
    given = problem(1, config, poison=False).with_inputs(advantages=torch.zeros(6).double())
    plain = run(module(config), given)
    weighted = run(
        module(config), given.given(sampling_ratio=torch.full((6,), 0.01, dtype=torch.float64))
    )
    assert plain.loss > 0
    assert torch.equal(weighted.loss, plain.loss)


def test_a22_vespo_folds_the_rollout_weight_into_phi() -> None:
    """linkedin/Liger-Kernel#1082 for vespo: log w gains log s, once a sequence."""
    config = config_of("vespo")
    given = on_policy(problem(1, config, poison=False), advantages=torch.ones(6).double())
    log_s = math.log(0.5)
    result = run(module(config), given.given(sampling_ratio=torch.full((6,), 0.5).double()))
    phi = torch.full((6, 16), math.exp(3 + 2 * log_s - 3 * 0.5), dtype=torch.float64)
    expected = torch.where(given.active, phi, 1)
    assert_close(result.outputs["phi"], expected, FLOAT64, "phi")


LENGTHS = torch.arange(1, 9)


def one_batch(config: RatioKLConfig, **options) -> Problem:
    """Eight rows of 1 to 8 tokens: 36 in all."""
    made = problem(2, config, B=8, T=8, poison=False, **options)
    return made.with_inputs(attention_mask=torch.arange(8) < LENGTHS[:, None])


def cut(given: Problem, rows: slice) -> Problem:
    """Some sequences of a problem, on the same leaves."""
    per_row = {
        name: value[rows] if isinstance(value, torch.Tensor) and value.shape[:1] == (8,) else value
        for name, value in given.options.items()
    }
    hidden, weight, *others = given.inputs
    return Problem((hidden[rows], weight, *(x[rows] for x in others)), per_row)


def accumulated(config: RatioKLConfig, given: Problem, cuts: list[slice], **extra):
    """Summed loss and gradients of the micro-batches."""
    loss = sum(
        module(config)(*part.inputs, **part.options).loss
        for part in (cut(given.given(**extra), rows) for rows in cuts)
    )
    return loss, torch.autograd.grad(loss, [given.inputs[0], given.inputs[1]])


def assert_cut_changes_nothing(config, given, cuts, *, extra, whole=None) -> None:
    whole = extra if whole is None else whole
    expected = accumulated(config, given, [slice(0, 8)], **whole)
    actual = accumulated(config, given, cuts, **extra)
    assert_close(actual[0], expected[0], 1e-10, "loss")  # terms of both signs cancel in the loss
    for name, a, b in zip(("hidden", "weight"), actual[1], expected[1], strict=True):
        assert b.any()
        assert_close(a, b, FLOAT64, name)


EQUAL_CUTS = {
    "2 x 4": [slice(0, 4), slice(4, 8)],
    "8 x 1": [slice(i, i + 1) for i in range(8)],
}
ANY_CUTS = EQUAL_CUTS | {"1 + 4 + 3": [slice(0, 1), slice(1, 5), slice(5, 8)]}


@pytest.mark.parametrize("items", [36, 36.0, torch.tensor(36)])
@pytest.mark.parametrize("cuts", ANY_CUTS.values(), ids=ANY_CUTS.keys())
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_a23_a_count_of_the_whole_step_makes_any_cut_equal(loss_type: str, cuts, items) -> None:
    """The learning rate changes with accumulation (huggingface/trl#5619, ms-swift#10117).

    gradient_accumulation_steps divides nothing there: the count spans the step already.
    """
    config = config_of(loss_type, beta=0.1)
    given = one_batch(config, sampling_ratio="token")
    whole = {"num_items_in_batch": items}
    assert_cut_changes_nothing(config, given, cuts, extra=whole)
    steps = whole | {"gradient_accumulation_steps": len(cuts)}
    assert_cut_changes_nothing(config, given, cuts, extra=steps, whole=whole)


@pytest.mark.parametrize("cuts", EQUAL_CUTS.values(), ids=EQUAL_CUTS.keys())
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo"])
def test_a23_equal_numbers_of_sequences_make_a_cut_equal(loss_type: str, level, cuts) -> None:
    """huggingface/trl#5619 for the losses that divide by sequences."""
    config = config_of(loss_type, beta=0.1, importance_sampling_level=level)
    given = one_batch(config)
    steps = {"gradient_accumulation_steps": len(cuts)}
    assert_cut_changes_nothing(config, given, cuts, extra=steps, whole={})


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_a23_equal_numbers_of_tokens_too_for_token_means(loss_type: str) -> None:
    """huggingface/trl#5619 for bnpo, the entropy bonus, and dapo without a count."""
    config = config_of(loss_type, beta=0.1, entropy_coef=0.05)
    cuts = EQUAL_CUTS["2 x 4"]
    given = one_batch(config)
    equal = given.with_inputs(attention_mask=given.active[[0, 3, 5, 6, 1, 2, 4, 7]])
    counts = [int(equal.active[rows].sum()) for rows in cuts]
    assert counts == [18, 18]
    steps = {"gradient_accumulation_steps": 2}
    assert_cut_changes_nothing(config, equal, cuts, extra=steps, whole={})
    with pytest.raises(AssertionError, match="relative error"):
        assert_cut_changes_nothing(config, given, cuts, extra=steps, whole={})


def test_a23_the_entropy_mask_is_not_equal_over_micro_batches() -> None:
    """huggingface/trl#5619: each micro-batch has its own threshold, and the docs say so."""
    config = config_of("dapo", top_entropy_quantile=0.5)
    with pytest.raises(AssertionError, match="relative error"):
        assert_cut_changes_nothing(
            config, one_batch(config), EQUAL_CUTS["8 x 1"], extra={"num_items_in_batch": 36}
        )


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a24_a_dropped_row_leaves_the_denominator_too(loss_type: str) -> None:
    """Loss 17 % low: dropped rows left the numerator only (huggingface/trl#6369).

    30 tokens, 5 of them in the dropped row; each term is -A = -2, so the loss is -50 / 25.
    """
    mask = torch.ones(6, 5)
    mask[3] = 0
    config = config_of(loss_type)
    given = problem(3, config, B=6, T=5, poison=False)
    given = on_policy(given, attention_mask=mask, advantages=torch.full((6,), 2.0).double())
    result = run(module(config), given)
    assert result.loss.item() == pytest.approx(-2.0, rel=FLOAT64)
    assert result.metrics["active_tokens"] == 25


def test_a25_softcap_is_c_tanh_x_over_c() -> None:
    """Softcap as x * tanh(x / c), or never enabled (unsloth-zoo#593, ml-cross-entropy#48).

    Logits 124 and 0 with cap 30: 29.98 instead of 124; the slope is 1 - tanh(124 / 30)^2.
    """
    hidden = torch.ones(1, 1, dtype=torch.float64).requires_grad_()
    weight = torch.tensor([[124.0], [0.0]], dtype=torch.float64).requires_grad_()
    out = linear_logprob(hidden, weight, torch.tensor([1]), softcap=30.0)
    capped = 30 * math.tanh(124 / 30)
    assert capped == pytest.approx(29.98, abs=0.01)
    assert out.logps.item() == pytest.approx(-capped - math.log1p(math.exp(-capped)), rel=FLOAT64)
    (d_weight,) = torch.autograd.grad(out.logps.sum(), weight)
    p = 1 / (1 + math.exp(-capped))
    # 1 - tanh^2 near 1 loses 3 digits of the 16.
    slope = -p * (1 - math.tanh(124 / 30) ** 2)
    assert d_weight[0].item() == pytest.approx(slope, rel=1e-9)


MODIFIERS = [
    {"softcap": 30.0},
    {"logit_scale": 0.0625},
    {"softcap": 2.0, "logit_scale": 3.0, "temperature": 0.7},
]


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
@pytest.mark.parametrize("modifiers", MODIFIERS, ids=str)
def test_a25_logit_modifiers(modifiers, chunk_bytes: int) -> None:
    """Cohere's and Granite's logit scale dropped (unsloth#11277, huggingface/trl#6629)."""
    leaves = [
        torch.randn(s, dtype=torch.float64).mul(3).requires_grad_() for s in ((70, 5), (99, 5))
    ]
    ids = torch.randint(0, 99, (70,))
    ours = linear_logprob(*leaves, ids, return_entropy=True, chunk_bytes=chunk_bytes, **modifiers)
    assert_agree(ours, reference_logprob(*leaves, ids, **modifiers), leaves)
    plain = linear_logprob(*leaves, ids).logps
    assert (plain - ours.logps).abs().max() > 0.1


def assert_agree(ours, theirs, leaves) -> None:
    for name, a, b in zip(("logps", "entropies"), ours[:2], theirs, strict=True):
        assert_close(a, b, FLOAT64, name)
        actual = torch.autograd.grad(a.sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad(b.sum(), leaves, retain_graph=True)
        for leaf, x, y in zip(("hidden", "weight"), actual, expected, strict=True):
            assert_close(x, y, 1e-11, f"{name}: {leaf}.grad")


@pytest.mark.parametrize("tau", [0.1, 0.7, 1, 2])
def test_a26_temperature(tau: float) -> None:
    """KL and ratio off when sampling at tau != 1 (OpenRLHF#853, miles#68, huggingface/trl#5731)."""
    leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((70, 5), (99, 5))]
    ids = torch.randint(0, 99, (70,))
    ours = linear_logprob(*leaves, ids, return_entropy=True, temperature=tau)
    assert_agree(ours, reference_logprob(*leaves, ids, temperature=tau), leaves)
    own = ours.logps.detach().view(5, 14)
    for temperature in (tau, torch.full((5,), tau)):
        out = module(config_of("grpo", beta=0.1))(
            leaves[0].view(5, 14, 5), leaves[1], ids.view(5, 14), torch.ones(5, 14),
            torch.ones(5), old_logps=own, ref_logps=own, temperature=temperature,
        )  # fmt: skip
        # A float32 temperature of 0.1 or 0.7 is another number by 2e-8 of it.
        torch.testing.assert_close(out.ratio, torch.ones_like(out.ratio), rtol=1e-5, atol=0)
        assert out.kl.abs().max() <= 1e-10


@pytest.mark.parametrize("tau", [0, -1, 0.0, math.nan, math.inf])
def test_a26_a_temperature_that_divides_nothing_is_refused(tau: float) -> None:
    """OpenRLHF/OpenRLHF#853: as an option, in the call, and as a tensor."""
    hidden, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        FusedLinearRatioKLLoss(temperature=tau)
    for given in (tau, torch.tensor([1.0, tau]), torch.tensor([[1.0], [tau]])):
        with pytest.raises(ValueError, match="temperature must be > 0"):
            module(config_of("dapo"))(hidden, weight, ids, mask, torch.ones(2), temperature=given)
        with pytest.raises(ValueError, match="temperature must be > 0"):
            linear_logprob(hidden, weight, ids, mask, temperature=given)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", -2.0),  # (1 + 27 / 9) / 2
        ("sapo", -4.0),  # the same of 2 A, sapo's term at ratio 1
        ("bnpo", -2.8),  # 28 / 10
        ("dapo", -2.8),
        ("dr_grpo", -28 / (2 * 17)),
        ("luspo", -14.0),  # 28 / 2
    ],
)
def test_a27_sequence_mean_and_token_mean(loss_type: str, expected: float) -> None:
    """Token mean where the mean per sequence was meant (Liger-Kernel#626, huggingface/trl#3187).

    Lengths 1 and 9, terms 1 and 3 a token.
    """
    config = config_of(loss_type)
    given = problem(4, config, B=2, T=9, poison=False)
    mask = torch.arange(9) < torch.tensor([[1], [9]])
    given = on_policy(given, attention_mask=mask, advantages=torch.tensor([1.0, 3.0]).double())
    assert run(module(config), given).loss.item() == pytest.approx(expected, rel=FLOAT64)


# For each option a loss type and a value at which the problem below must feel it.
EFFECTS = {
    "importance_sampling_level": ("grpo", "sequence"),
    "beta": ("grpo", 0.7),
    "kl_estimator": ("grpo", "k1"),
    "use_bias_correction_kl": ("grpo", True),
    "epsilon_low": ("grpo", 0.4),
    "epsilon_high": ("grpo", 0.05),
    "delta": ("grpo", 1.1),
    "max_completion_length": ("dr_grpo", 5),
    "sapo_temperature_pos": ("sapo", 2.0),
    "sapo_temperature_neg": ("sapo", 3.0),
    "vespo_k_pos": ("vespo", 1.0),
    "vespo_lambda_pos": ("vespo", 1.0),
    "vespo_k_neg": ("vespo", 1.0),
    "vespo_lambda_neg": ("vespo", 1.0),
    "top_entropy_quantile": ("grpo", 0.5),
    "off_policy_mask_threshold": ("grpo", 0.1),
    "entropy_coef": ("grpo", 0.1),
    "log_ratio_limit": ("grpo", 0.3),
    "temperature": ("grpo", 0.7),
    "logit_scale": ("grpo", 0.5),
    "softcap": ("grpo", 2.0),
    "vocab_size": ("grpo", 149),
}
OPTIONS = sorted({field.name for field in fields(RatioKLConfig)} - {"loss_type"})


@pytest.mark.parametrize("option", OPTIONS)
def test_a28_no_option_is_silently_ignored(option: str) -> None:
    """Option set, fused path ignores it (huggingface/trl#7009, #6808, #5595, #4975)."""
    loss_type, value = EFFECTS[option]
    plain = config_of(loss_type, beta=0.1)
    given = problem(5, plain)
    given = given.with_inputs(action_ids=given.inputs[2].clamp(max=140))
    options = {"beta": 0.1, option: value}
    before = run(module(plain), given)
    after = run(module(config_of(loss_type, **options)), given)
    moved = (after.loss - before.loss).abs() / before.loss.abs()
    assert moved > 1e-6
    assert not torch.equal(after.grads["weight"], before.grads["weight"])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a28_every_loss_type_is_another_loss(loss_type: str) -> None:
    """huggingface/trl#7009: a name that falls through to a default would give its number."""
    configs = {name: config_of(name, beta=0.1) for name in LOSS_TYPES}
    # Two items more than there are active tokens tell dapo from bnpo.
    given = problem(5, configs["grpo"])
    given = given.given(num_items_in_batch=int(given.active.sum()) + 2)
    losses = {name: run(module(config), given).loss.item() for name, config in configs.items()}
    others = [loss for name, loss in losses.items() if name != loss_type]
    assert min(abs(losses[loss_type] - other) for other in others) > 1e-6


@pytest.mark.parametrize("option", ["aux_loss_coef", "gmpo", "scale_rewards", "loss_typ", "chunk"])
def test_a28_an_unknown_option_is_refused(option: str) -> None:
    """huggingface/trl#6808, #7270: MoE's auxiliary loss, GMPO's objective."""
    with pytest.raises(ValueError, match=f"unknown option {option}"):
        FusedLinearRatioKLLoss(**{option: 1})


def test_a28_the_mask_may_exclude_tool_output_inside_a_completion() -> None:
    """Tool tokens in the loss (huggingface/trl#4975): the product of the masks is honoured."""
    config = config_of("dapo", beta=0.1, importance_sampling_level="sequence")
    given = problem(6, config, poison=False)
    tools = torch.rand(6, 16) > 0.3
    completion = torch.arange(16) < 13
    mask = tools & completion
    result = run(module(config), given.with_inputs(attention_mask=mask))
    assert not result.grads["hidden"][~mask].any()
    assert result.metrics["active_tokens"] == mask.sum()
    junk = torch.where(mask[..., None], given.hidden.detach(), math.nan).requires_grad_()
    again = run(module(config), given.with_inputs(attention_mask=mask, hidden=junk))
    assert torch.equal(again.loss, result.loss)

"""FusedLinearRatioKLLoss as a module: construction, copies, outputs, and schedules of gradients."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch

from cases.meter import metered
from ratio_kl import FusedLinearRatioKLLoss, LossOutput, Metrics, RatioKLConfig
from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES
from support import (
    PER_TOKEN_OUTPUTS,
    Problem,
    assert_close,
    assert_same,
    config_of,
    module,
    problem,
    run,
    run_reference,
)

FLOAT64 = 1e-12
KINDS = [
    (loss_type, level)
    for loss_type in LOSS_TYPES
    for level in IMPORTANCE_SAMPLING_LEVELS
    if loss_type != "vespo" or level == "token"
]


def test_options_come_as_a_config_or_as_keywords() -> None:
    config = RatioKLConfig(loss_type="grpo", beta=0.04, epsilon_high=0.28)
    assert FusedLinearRatioKLLoss(config).config is config
    named = FusedLinearRatioKLLoss(loss_type="grpo", beta=0.04, epsilon_high=0.28)
    assert named.config == config
    assert FusedLinearRatioKLLoss().config == RatioKLConfig()


WRONG = [
    (lambda: FusedLinearRatioKLLoss(RatioKLConfig(), beta=0.1, delta=2.0), ValueError,
     "options came twice: in config and as beta, delta; pass one"),
    (lambda: FusedLinearRatioKLLoss({"beta": 0.1}), TypeError,
     r"config must be a RatioKLConfig or None; got \{'beta': 0.1\} of type dict"),
    (lambda: FusedLinearRatioKLLoss("grpo"), TypeError, "config must be a RatioKLConfig .*'grpo'"),
    (lambda: FusedLinearRatioKLLoss(epsilon=0.2), ValueError,
     r"unknown option epsilon; did you mean epsilon_(low|high)\?.*Known options: loss_type, "),
    (lambda: FusedLinearRatioKLLoss(zzz=1), ValueError, r"unknown option zzz\. Known options"),
    (lambda: FusedLinearRatioKLLoss(beta=-1), ValueError, "beta must be >= 0 and finite; got -1"),
    (lambda: FusedLinearRatioKLLoss(beta="0"), TypeError, "beta must be a number .*; got '0'"),
    (lambda: FusedLinearRatioKLLoss(backend="cuda"), ValueError, "backend must be .*; got 'cuda'"),
    (lambda: FusedLinearRatioKLLoss(chunk_bytes=0), ValueError, "chunk_bytes must be .*; got 0"),
    (lambda: FusedLinearRatioKLLoss(chunk_bytes=None), TypeError, "chunk_bytes must be .*None"),
    (lambda: FusedLinearRatioKLLoss(validate="no"), ValueError, "validate must be .*; got 'no'"),
    (lambda: FusedLinearRatioKLLoss(grads="both"), ValueError, "grads must be .*; got 'both'"),
    (lambda: FusedLinearRatioKLLoss(grads=None), TypeError, "grads must be .*; got None of type"),
    (lambda: FusedLinearRatioKLLoss(backend=1), TypeError, "backend must be .*; got 1 of type int"),
    (lambda: FusedLinearRatioKLLoss(validate=1), TypeError, "validate must be .*; got 1 of type"),
    (lambda: FusedLinearRatioKLLoss(tp_hidden_grad=None), TypeError, "tp_hidden_grad must be .*No"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "match"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_construction_refuses(make, error, match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_an_unknown_option_has_a_readable_message() -> None:
    with pytest.raises(ValueError) as caught:
        FusedLinearRatioKLLoss(zzz=1)
    # Two sentences, or one clause after another: never two words run into each other.
    assert str(caught.value).startswith(("unknown option zzz; ", "unknown option zzz. "))


def test_a_process_group_of_a_wrong_type_is_refused() -> None:
    for group in ("global", 3, [0, 1]):
        with pytest.raises(TypeError, match="process_group must be None"):
            FusedLinearRatioKLLoss(process_group=group)


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(FusedLinearRatioKLLoss()) == "FusedLinearRatioKLLoss()"
    made = FusedLinearRatioKLLoss(loss_type="cispo", epsilon_high=5.0, softcap=30.0)
    assert made.extra_repr() == "loss_type='cispo', epsilon_high=5.0, softcap=30.0"


def test_copies_compute_the_same() -> None:
    config = config_of(beta=0.1, top_entropy_quantile=0.5)
    original = module(config, chunk_bytes=12345, validate="eager", grads="forward")
    given = problem(2, config)
    expected = run(original, given)
    for made in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert made.config == config
        assert made.runtime == original.runtime
        assert_same(run(made, given), expected, 0.0)
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_module_holds_nothing_to_train_or_to_save() -> None:
    made = module(config_of())
    assert not list(made.parameters())
    assert not list(made.buffers())
    assert made.state_dict() == {}
    assert not made.train().eval().training


def test_the_module_is_documented() -> None:
    parameters = set(inspect.signature(FusedLinearRatioKLLoss.forward).parameters) - {"self"}
    text = inspect.getdoc(FusedLinearRatioKLLoss.forward)
    assert all(name in text for name in parameters)


def test_check_without_pending_errors_says_nothing() -> None:
    assert FusedLinearRatioKLLoss.check() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_outputs_have_the_promised_form(loss_type: str, level: str, dtype: torch.dtype) -> None:
    config = config_of(loss_type, level, beta=0.1, entropy_coef=0.01, top_entropy_quantile=0.5)
    given = problem(3, config, dtype=dtype)
    out = module(config)(*given.inputs, **given.options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert isinstance(out, LossOutput)
    assert isinstance(out.metrics, Metrics)
    assert (out.loss.shape, out.loss.dtype, out.loss.requires_grad) == ((), wide, True)
    for name, metric in out.metrics._asdict().items():
        expected = torch.int64 if name == "active_tokens" else wide
        assert (metric.shape, metric.dtype, metric.requires_grad) == ((), expected, False), name
    neutral = {"ratio": 1.0, "phi": 1.0}
    for name in PER_TOKEN_OUTPUTS:
        value = getattr(out, name)
        if name == "phi" and loss_type != "vespo":
            assert value is None
            continue
        expected = torch.bool if name.endswith("clipped") else wide
        assert (value.shape, value.dtype) == (given.inputs[2].shape, expected), name
        assert not value.requires_grad
        assert (value[~given.active] == neutral.get(name, 0)).all(), name
        assert value.isfinite().all()


@pytest.mark.parametrize("name", ["loss", *PER_TOKEN_OUTPUTS[:-1]])
def test_writing_into_an_output_is_never_silently_wrong(name: str) -> None:
    # Harmless, or torch's own error about a saved tensor: no other gradient.
    config = config_of(beta=0.1, entropy_coef=0.1, use_bias_correction_kl=True)
    given = problem(4, config)
    expected = run(module(config), given)
    out = module(config)(*given.inputs, **given.options)
    getattr(out, name).detach().zero_()
    try:
        grads = torch.autograd.grad(out.loss, list(given.leaves.values()))
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    for (leaf, wanted), grad in zip(expected.grads.items(), grads, strict=True):
        assert torch.equal(grad, wanted), leaf


def test_logps_can_be_reused_as_old_logps() -> None:
    config = config_of(beta=0.1)
    given = problem(5, config)
    first = run(module(config), given.given(old_logps=None))
    logps = first.outputs["logps"]
    again = run(module(config), given.given(old_logps=logps))
    assert_same(again, first, 0.0)
    assert torch.equal(again.outputs["ratio"], torch.ones_like(logps))
    reused = run(module(config), given.given(old_logps=logps, ref_logps=logps))
    assert not reused.outputs["kl"].any()


@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_no_active_token(loss_type: str, level: str) -> None:
    config = config_of(
        loss_type, level, beta=0.1, entropy_coef=0.1, top_entropy_quantile=0.5,
        off_policy_mask_threshold=0.0,
    )  # fmt: skip
    given = problem(6, config, bias=True, sampling_ratio="token")
    given = given.with_inputs(attention_mask=torch.zeros(6, 16))
    junk = torch.full_like(given.hidden, torch.nan).requires_grad_()
    result = run(module(config), given.with_inputs(hidden=junk))
    assert result.loss == 0
    assert all(metric == 0 for metric in result.metrics.values())
    assert not any(grad.any() for grad in result.grads.values())
    out = module(config)(*given.inputs, **given.options)
    assert out.loss.requires_grad


@pytest.mark.parametrize(
    "coefficient", [0.0, 0.3, -0.2, 1, torch.tensor(0.3), torch.tensor([0.3]), torch.tensor(0.0)]
)
def test_a_coefficient_in_the_call_overrides_the_configs(coefficient) -> None:
    config = config_of(entropy_coef=0.05)
    given = problem(7, config)
    value = float(coefficient)
    expected = run(module(replace(config, entropy_coef=value)), given)
    actual = run(module(config), given.given(entropy_coef=coefficient))
    # A float32 0.3 is another number by 1e-8 of it.
    tolerance = 1e-7 if isinstance(coefficient, torch.Tensor) else 0.0
    assert_same(actual, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_the_loss_keeps_its_dtype_whatever_the_coefficients(dtype: torch.dtype) -> None:
    config = config_of(beta=0.1)
    given = problem(7, config, dtype=torch.float32)
    given = given.given(
        entropy_coef=torch.tensor(1, dtype=dtype), num_items_in_batch=torch.tensor(40, dtype=dtype)
    )
    assert run(module(config), given).loss.dtype == torch.float32


@pytest.mark.parametrize(
    "temperature", [0.7, 2, torch.tensor(0.7), torch.full((6,), 0.7), torch.full((6, 1), 0.7)]
)
def test_a_temperature_in_the_call_overrides_the_configs(temperature) -> None:
    config = config_of(temperature=1.3, entropy_coef=0.1)
    given = problem(8, config)
    value = float(temperature.max() if isinstance(temperature, torch.Tensor) else temperature)
    expected = run(module(replace(config, temperature=value)), given)
    actual = run(module(config), given.given(temperature=temperature))
    assert_same(actual, expected, 0.0)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_accumulation_steps(loss_type: str, items, steps: int) -> None:
    config = config_of(loss_type, beta=0.1)
    given = problem(9, config).given(num_items_in_batch=items)
    plain = run(module(config), given)
    divided = run(module(config), given.given(gradient_accumulation_steps=steps))
    spans = items is not None and loss_type in ("dapo", "cispo", "vespo")
    factor = 1 if spans else 1 / steps
    assert_close(divided.loss, plain.loss * factor, FLOAT64, "loss")
    for name, grad in divided.grads.items():
        assert_close(grad, plain.grads[name] * factor, FLOAT64, name)


def test_the_bonus_is_divided_by_the_steps_for_every_loss() -> None:
    for loss_type in LOSS_TYPES:
        config = config_of(loss_type, entropy_coef=0.3)
        given = problem(9, config).given(num_items_in_batch=50)
        for steps in (1, 5):
            result = run(module(config), given.given(gradient_accumulation_steps=steps))
            bonus = 0.3 * result.metrics["entropy"] / steps
            assert_close(result.loss, result.metrics["policy_loss"] - bonus, FLOAT64, loss_type)


@pytest.mark.parametrize("frozen", [(), ("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_gradients_in_forward_are_those_of_backward(loss_type: str, level: str, frozen) -> None:
    config = config_of(loss_type, level, beta=0.1, entropy_coef=0.05, top_entropy_quantile=0.6)

    def grads(schedule: str, *, times: int = 1) -> tuple[torch.Tensor, dict]:
        given = problem(10, config, bias=True)
        for name in frozen:
            given.leaves[name].requires_grad_(False)
        out = module(config, grads=schedule)(*given.inputs, **given.options)
        for _ in range(times):
            (out.loss * 0.5).backward(retain_graph=True)
        return out.loss.detach(), {name: leaf.grad for name, leaf in given.leaves.items()}

    late, early = grads("backward"), grads("forward")
    twice = grads("forward", times=2)[1]
    assert torch.equal(late[0], early[0])
    for name, grad in late[1].items():
        if name in frozen:
            assert grad is None
            assert early[1][name] is None
        else:
            assert_close(early[1][name], grad, FLOAT64, name)
            assert torch.equal(twice[name], 2 * early[1][name])


def test_gradients_in_forward_of_float16_wait_for_the_loss_scale() -> None:
    """A 65536th of them lies below float16's range; times 65536 they are whole again."""
    config = config_of(beta=0.1)
    given = problem(10, config, bias=True, dtype=torch.float16)
    leaves = list(given.leaves.values())
    whole = torch.autograd.grad(module(config)(*given.inputs, **given.options).loss, leaves)
    parts = given.given(gradient_accumulation_steps=2**16)
    out = module(config, grads="forward")(*parts.inputs, **parts.options)
    for actual, wanted in zip(torch.autograd.grad(out.loss * 2**16, leaves), whole, strict=True):
        assert actual.dtype == torch.float16
        # Each is rounded once to 11 bits.
        assert_close(actual, wanted, 2.0**-10, "gradient")


def test_gradients_in_forward_leave_nothing_to_read_afterwards() -> None:
    config = config_of(beta=0.1, entropy_coef=0.05)
    given = problem(11, config, bias=True)
    expected = run(module(config), given)
    out = module(config, grads="forward")(*given.inputs, **given.options)
    for leaf in given.leaves.values():
        leaf.data.fill_(torch.nan)
    with metered() as meter:
        grads = torch.autograd.grad(out.loss, list(given.leaves.values()))
    assert not meter.passes
    assert not meter.multiplications
    for (name, wanted), grad in zip(expected.grads.items(), grads, strict=True):
        assert_close(grad, wanted, FLOAT64, name)


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_a_loss_scaled_in_place(schedule: str) -> None:
    config = config_of(beta=0.1, entropy_coef=0.05)
    given = problem(11, config)
    out = module(config, grads=schedule)(*given.inputs, **given.options)
    loss, metric = out.loss, out.metrics.policy_loss.clone()
    loss /= 4
    grads = torch.autograd.grad(loss, list(given.leaves.values()))
    assert torch.equal(out.metrics.policy_loss, metric)
    for (name, wanted), grad in zip(run(module(config), given).grads.items(), grads, strict=True):
        assert_close(4 * grad, wanted, FLOAT64, name)


@contextmanager
def inference_mode_and_grad_mode() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, inference_mode_and_grad_mode]
)
def test_gradients_in_forward_are_not_computed_without_grad_mode(mode) -> None:
    config = config_of(beta=0.1)
    given = problem(11, config)
    expected = run(module(config), given)
    with metered() as meter, mode():
        out = module(config, grads="forward")(*given.inputs, **given.options)
    assert meter.passes == ["forward"]
    assert torch.equal(out.loss, expected.loss)


def test_gradients_in_forward_cost_nothing_with_nothing_to_train() -> None:
    config = config_of(beta=0.1)
    given = problem(11, config)
    for leaf in given.leaves.values():
        leaf.requires_grad_(False)
    with metered() as meter:
        out = module(config, grads="forward")(*given.inputs, **given.options)
    assert not out.loss.requires_grad
    assert meter.passes == ["forward"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_under_activation_checkpointing(schedule: str, reentrant: bool) -> None:
    config = config_of(beta=0.1, entropy_coef=0.05)
    given = problem(12, config)
    expected = run(module(config), given)

    def checkpointed(*inputs, **options):
        kept = []

        def inner(hidden, weight):
            out = module(config, grads=schedule)(hidden, weight, *inputs[2:], **options)
            kept.append(out)
            return out.loss

        loss = torch.utils.checkpoint.checkpoint(inner, *inputs[:2], use_reentrant=reentrant)
        return kept[0]._replace(loss=loss)

    if reentrant:  # supports backward() only
        checkpointed(*given.inputs, **given.options).loss.backward()
        grads = {name: leaf.grad for name, leaf in given.leaves.items()}
    else:
        grads = run(checkpointed, given).grads
    for name, grad in grads.items():
        assert_close(grad, expected.grads[name], FLOAT64, name)


def test_checkpointing_makes_no_gradient_in_forward_twice() -> None:
    """What the loss saves for its own backward, in forward, would be made by one more forward."""
    config = config_of(beta=0.1)
    given = problem(12, config)

    def inner(*leaves):
        return module(config, grads="forward")(*leaves, *given.inputs[2:], **given.options).loss

    with metered() as meter:
        loss = torch.utils.checkpoint.checkpoint(inner, *given.inputs[:2], use_reentrant=False)
    assert meter.passes == ["forward", "backward"]
    with metered() as meter:
        loss.backward()
    assert meter.passes == ["forward", "backward"]


def test_every_option_of_the_config_is_a_keyword() -> None:
    for field in fields(RatioKLConfig):
        made = FusedLinearRatioKLLoss(**{field.name: getattr(RatioKLConfig(), field.name)})
        assert made.config == RatioKLConfig()


@pytest.mark.parametrize("chunk_bytes", [1, 2, 1000, 10**5, 2**40])
def test_execution_knobs_change_nothing_beyond_rounding(chunk_bytes: int) -> None:
    config = config_of(beta=0.1, entropy_coef=0.05)
    given: Problem = problem(13, config, bias=True)
    expected = run_reference(config, given)
    for knobs in ({"validate": "eager"}, {"backend": "torch"}, {"grads": "forward"}):
        assert_same(run(module(config, chunk_bytes=chunk_bytes, **knobs), given), expected, 1e-10)


def test_an_option_cannot_be_set_afterwards() -> None:
    loss_fn = FusedLinearRatioKLLoss(beta=0.1)
    with pytest.raises(AttributeError, match="beta is an option and fixed: build another loss"):
        loss_fn.beta = 0.2
    with pytest.raises(AttributeError, match="FusedLinearRatioKLLoss.loss_fn.config, grads='forw"):
        loss_fn.grads = "forward"
    for name in set(inspect.signature(FusedLinearRatioKLLoss).parameters) - {"config", "options"}:
        with pytest.raises(AttributeError, match=f"{name} is an option and fixed"):
            setattr(loss_fn, name, None)
    loss_fn.note = "other attributes may be"
    assert loss_fn.config.beta == 0.1


def test_hidden_states_of_one_token_more_than_ids() -> None:
    hidden, weight = torch.randn(2, 5, 4), torch.randn(7, 4)
    ids, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"action_ids must have shape .* pass hidden\[:, :-1\]"):
        FusedLinearRatioKLLoss()(hidden, weight, ids, mask, torch.ones(2))

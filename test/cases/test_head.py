"""Faults that users of such losses have met: the lm_head and the model around the loss."""

import pytest
import torch
from torch import nn

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.config import RatioKLConfig
from ratio_kl.reference import reference_logprob
from support import assert_close, assert_same, problem, run, run_reference

FLOAT64 = 1e-12


def test_a37_gradients_reach_an_adapter_on_the_head() -> None:
    """LoRA on lm_head trains nothing (huggingface/trl#4612, unslothai/unsloth#9331)."""
    hidden, base = torch.randn(2, 4, 10).double(), torch.randn(15, 10).double()
    A = torch.randn(3, 10).double().requires_grad_()
    B = torch.zeros(15, 3).double().requires_grad_()  # as LoRA starts
    ids = torch.randint(0, 15, (2, 4))
    ours = linear_logprob(hidden, base + 2.0 * B @ A, ids).logps
    (d_B,) = torch.autograd.grad(ours.sum(), B)
    expected = reference_logprob(hidden, base + 2.0 * B @ A, ids)[0]
    assert d_B.abs().max() > 0.1
    assert_close(d_B, torch.autograd.grad(expected.sum(), B)[0], FLOAT64, "B")
    trained = (B.detach() - 0.1 * d_B).requires_grad_()
    ours = linear_logprob(hidden, base + 2.0 * trained @ A, ids).logps
    expected = reference_logprob(hidden, base + 2.0 * trained @ A, ids)[0]
    actual = torch.autograd.grad(ours.sum(), [A, trained])
    for a, b in zip(actual, torch.autograd.grad(expected.sum(), [A, trained]), strict=True):
        assert b.abs().max() > 0.01
        assert_close(a, b, FLOAT64, "adapter")


BIASES = {
    "no bias": (None, True),
    "trained": (torch.float64, True),
    "frozen": (torch.float64, False),
    "another dtype": (torch.float32, True),
    "bfloat16": (torch.bfloat16, True),
}


@pytest.mark.parametrize(("dtype", "trained"), BIASES.values(), ids=BIASES.keys())
def test_a39_bias_of_the_head(dtype, trained: bool) -> None:
    """lm_head bias ignored (huggingface/trl#7065, #5949; modelscope/ms-swift#4966)."""
    config = RatioKLConfig(beta=0.1, entropy_coef=0.01)
    given = problem(1, config)
    bias = None if dtype is None else torch.linspace(-5, 5, 150).to(dtype).requires_grad_(trained)
    wide = None if dtype is None else bias.detach().double().requires_grad_(trained)

    def gradients(loss):
        leaves = [given.inputs[0], given.inputs[1]]
        return torch.autograd.grad(loss, leaves, retain_graph=True)

    out = FusedLinearRatioKLLoss(config)(*given.inputs, **given.options, bias=bias)
    expected = (
        run_reference(config, given.given(bias=wide)) if trained and bias is not None else None
    )
    without = FusedLinearRatioKLLoss(config)(*given.inputs, **given.options)
    if bias is None:
        assert torch.equal(out.loss, without.loss)
        return
    assert not torch.equal(out.logps, without.logps)
    d_hidden, d_weight = gradients(out.loss)
    if not trained:
        out.loss.backward()
        assert bias.grad is None
        trained_too = problem(1, config).given(bias=bias.clone().requires_grad_())
        expected = run(FusedLinearRatioKLLoss(config), trained_too)
    else:
        (d_bias,) = torch.autograd.grad(out.loss, bias, retain_graph=True)
        assert d_bias.dtype == dtype
        unit = {torch.float64: FLOAT64, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}[dtype]
        assert_close(d_bias, expected.grads["bias"], unit, "bias")
    assert_close(out.logps, expected.outputs["logps"], FLOAT64, "logps")
    assert_close(d_hidden, expected.grads["hidden"], 1e-11, "hidden")
    assert_close(d_weight, expected.grads["weight"], 1e-11, "weight")


class TinyModel(nn.Module):
    """A body, a head, and the loss inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 150, bias=True)
        self.loss_fn = FusedLinearRatioKLLoss(beta=0.1, entropy_coef=0.01)

    def forward(self, x, *inputs, **options):
        return self.loss_fn(
            self.body(x), self.lm_head.weight, *inputs, bias=self.lm_head.bias, **options
        )


def test_a40_a_model_is_never_patched() -> None:
    """Two fused patches together: loss and reward off (verl-project/verl#1720, #2119, #2609)."""
    model = TinyModel()
    modules = [model, *model.children()]
    before = [dict(vars(module)) for module in modules]
    forwards = [type(module).forward for module in modules]
    functions = dict(vars(torch.nn.functional)), dict(vars(nn.Linear))
    given = problem(2, dtype=torch.float32, poison=False)
    x, _, *inputs = given.inputs
    first = model(x, *inputs, **given.options).loss
    first.backward()
    assert [dict(vars(module)) for module in modules] == before
    assert [type(module).forward for module in modules] == forwards
    assert (dict(vars(torch.nn.functional)), dict(vars(nn.Linear))) == functions
    assert list(model.state_dict()) == [
        "body.weight", "body.bias", "lm_head.weight", "lm_head.bias"
    ]  # fmt: skip
    assert model.lm_head.weight.grad.any()
    # A second loss on the same model changes nothing for the first.
    TinyModel()(x, *inputs, **given.options)
    assert torch.equal(model(x, *inputs, **given.options).loss, first)


@pytest.mark.parametrize(
    "name", ["action_ids", "attention_mask", "old_logps", "ref_logps", "sampling_logps"]
)
def test_a40_lengths_that_do_not_match_are_refused(name: str) -> None:
    """verl-project/verl#2119: hidden comes shifted and cut to the completions, or it raises."""
    config = RatioKLConfig(beta=0.1)
    given = problem(3, config, sampling_logps=True)
    for longer in (1, -1):  # forgot to shift, or shifted twice
        value = dict(zip(("action_ids", "attention_mask"), given.inputs[2:4], strict=True))
        tensor = {**value, **given.options}[name]
        other = torch.cat([tensor, tensor[:, :1]], 1) if longer == 1 else tensor[:, 1:]
        changed = (
            given.with_inputs(**{name: other}) if name in value else given.given(**{name: other})
        )
        message = rf"{name} must have shape \[B, T\] = \[6, 16\]; got \[6, {16 + longer}\]"
        with pytest.raises(ValueError, match=message):
            run(FusedLinearRatioKLLoss(config), changed)


def test_a40_two_losses_on_one_hidden() -> None:
    """verl-project/verl#2609: the sum of two losses has the sum of their gradients."""
    first, second = RatioKLConfig(beta=0.1), RatioKLConfig(loss_type="luspo", entropy_coef=0.1)
    given = problem(4, first, bias=True)
    one, two = (run(FusedLinearRatioKLLoss(config), given) for config in (first, second))

    def both(*inputs, **options):
        out = FusedLinearRatioKLLoss(first)(*inputs, **options)
        other = FusedLinearRatioKLLoss(second)(*inputs, **options)
        return out._replace(loss=out.loss + other.loss)

    together = run(both, given)
    for name, grad in together.grads.items():
        assert_close(grad, one.grads[name] + two.grads[name], FLOAT64, name)
    assert_same(run(FusedLinearRatioKLLoss(first), given), one, 0.0)

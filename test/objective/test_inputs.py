"""The caller's tensors: what is taken, what is refused, and that nothing happens before that."""

import copy

import numpy as np
import pytest
import torch

from cases.meter import metered
from ratio_kl import FusedLinearRatioKLLoss
from ratio_kl.config import RatioKLConfig
from ratio_kl.objective.inputs import read_items
from support import problem, run

B, T, H, V = 2, 3, 4, 7


def arguments() -> dict:
    return {
        "hidden": torch.randn(B, T, H).requires_grad_(),
        "weight": torch.randn(V, H).requires_grad_(),
        "action_ids": torch.zeros(B, T, dtype=torch.int64),
        "attention_mask": torch.ones(B, T),
        "advantages": torch.ones(B),
    }


PER_TOKEN = ["action_ids", "attention_mask", "old_logps", "ref_logps", "sampling_logps"]
PER_EITHER = ["advantages", "sampling_ratio", "temperature"]
LOGPS = ["old_logps", "ref_logps", "sampling_logps"]
REQUIRED = ["hidden", "weight", "action_ids", "attention_mask", "advantages"]


def zeros(name: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64 if name == "action_ids" else torch.float32)


def refused(error: type[Exception], match: str, config: RatioKLConfig | None = None, **changed):
    """The call raises, before any product and without writing to any argument."""
    loss_fn = FusedLinearRatioKLLoss(config or RatioKLConfig(), process_group="local")
    given = arguments() | changed
    before = {k: x.detach().clone() for k, x in given.items() if isinstance(x, torch.Tensor)}
    with metered() as meter, pytest.raises(error, match=match):
        loss_fn(**given)
    assert not meter.passes
    for name, value in before.items():
        if value.device.type == "cpu":
            assert torch.equal(given[name].detach(), value), name
        assert getattr(given[name], "grad", None) is None


@pytest.mark.parametrize("name", REQUIRED)
def test_what_is_required(name: str) -> None:
    refused(TypeError, f"^{name} must be a tensor; got None of type NoneType", **{name: None})


@pytest.mark.parametrize("name", [*REQUIRED, *PER_TOKEN, "sampling_ratio", "bias", "cu_seqlens"])
def test_what_is_no_tensor(name: str) -> None:
    refused(TypeError, f"^{name} must be a tensor; got .*of type list", **{name: [[1.0]]})


@pytest.mark.parametrize("shape", [(B,), (B, 1), (T, B), (B, T + 1), (B * T,), (B, T, 1), ()])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_shapes_of_per_token_arguments(name: str, shape) -> None:
    match = rf"^{name} must have shape \[B, T\] = \[2, 3\]; got \[{', '.join(map(str, shape))}\]"
    refused(ValueError, match, **{name: zeros(name, *shape)})


@pytest.mark.parametrize("shape", [(T,), (1, B), (B, 2), (T, B), (B, 1, 1), (B + 1,)])
@pytest.mark.parametrize("name", PER_EITHER)
def test_shapes_of_per_sequence_arguments(name: str, shape) -> None:
    match = rf"^{name} must have shape .*\[B\] = \[2\].*\[B, 1\] = \[2, 1\]; got \["
    refused(ValueError, match, **{name: torch.ones(shape)})


@pytest.mark.parametrize("name", LOGPS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_dtypes_of_log_probs(name: str, dtype: torch.dtype) -> None:
    match = f"^{name} must have dtype float64, float32, bfloat16 or float16; got {dtype}"
    refused(ValueError, match, **{name: torch.zeros(B, T, dtype=dtype)})


@pytest.mark.parametrize("name", ["attention_mask", *PER_EITHER])
def test_dtypes_of_numbers(name: str) -> None:
    refused(ValueError, f"^{name} must have dtype", **{name: torch.ones(B, T).to(torch.complex64)})


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_EITHER, "weight", "bias"])
def test_devices(name: str) -> None:
    shape = {"weight": (V, H), "bias": (V,)}.get(name, (B, T))
    other = zeros(name, *shape).to("meta")
    refused(ValueError, f"^{name} must be on hidden's device, cpu; got meta", **{name: other})


@pytest.mark.parametrize("ref_weight", [None, torch.zeros(V, H, device="meta")])
def test_the_reference_must_be_on_hiddens_device_too(ref_weight) -> None:
    other = {"ref_hidden": torch.zeros(B, T, H, device="meta"), "ref_weight": ref_weight}
    match = "^ref_hidden must be on hidden's device, cpu; got meta"
    refused(ValueError, match, RatioKLConfig(beta=0.1), **other)


REFERENCES = [
    ({}, r"^beta=0.1 needs a reference: pass ref_logps, or ref_hidden .*; got neither"),
    ({"ref_weight": torch.zeros(V, H)}, "^beta=0.1 needs a reference"),
    (
        {"ref_logps": torch.zeros(B, T), "ref_hidden": torch.zeros(B, T, H)},
        "^the reference came twice: pass either ref_logps or ref_hidden, not both",
    ),
    ({"ref_hidden": torch.zeros(B, T + 1, H)}, r"^ref_hidden must have .*\[2, 3\].*got \[2, 4\]"),
    ({"ref_hidden": torch.zeros(B, T, 5)}, r"^ref_weight must have shape .*H = 5 as in ref_hidden"),
    (
        {"ref_hidden": torch.zeros(B, T, 5), "ref_weight": torch.zeros(5, V)},
        r"^ref_weight .*; it looks transposed",
    ),
    (
        {"ref_hidden": torch.zeros(B, T, H), "ref_bias": torch.zeros(V + 1)},
        r"^ref_bias must have shape \[V\] = \[7\]; got \[8\]",
    ),
    ({"ref_hidden": torch.zeros(B, T, H).long()}, "^ref_hidden must have dtype float64"),
    (
        {"ref_hidden": torch.zeros(B, T, H), "ref_weight": torch.zeros(0)},
        "^ref_weight is empty",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "match"), REFERENCES, ids=[str(i) for i in range(9)])
def test_references(given: dict, match: str) -> None:
    refused(ValueError, match, RatioKLConfig(beta=0.1), **given)


def test_a_reference_given_twice_is_refused_even_where_none_is_needed() -> None:
    both = {"ref_logps": torch.zeros(B, T), "ref_hidden": torch.zeros(B, T, H)}
    refused(ValueError, "the reference came twice", RatioKLConfig(beta=0.0), **both)


def test_a_reference_weight_beside_log_probs_is_accepted() -> None:
    loss_fn = FusedLinearRatioKLLoss(beta=0.1)
    logps = {"ref_logps": torch.zeros(B, T)}
    torch.manual_seed(0)
    plain = loss_fn(**arguments(), **logps)
    torch.manual_seed(0)
    beside = loss_fn(**arguments(), **logps, ref_weight=torch.randn(V, H))
    assert torch.equal(plain.loss, beside.loss)


def test_a_reference_of_another_width() -> None:
    config = RatioKLConfig(beta=0.1)
    given = problem(1, config, reference="none", poison=False)
    ref_hidden, ref_weight = torch.randn(6, 16, 3).double(), torch.randn(150, 3).double()
    scored = run(
        FusedLinearRatioKLLoss(config),
        given.given(ref_hidden=ref_hidden, ref_weight=ref_weight),
    )
    logps = torch.log_softmax(ref_hidden @ ref_weight.T, -1)
    logps = logps.gather(-1, given.inputs[2][..., None]).squeeze(-1)
    given_logps = run(FusedLinearRatioKLLoss(config), given.given(ref_logps=logps))
    torch.testing.assert_close(scored.loss, given_logps.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        scored.outputs["kl"], given_logps.outputs["kl"], rtol=1e-9, atol=1e-12
    )


OTHERS = [
    ("num_items_in_batch", "36", TypeError, "a number, a tensor with one element or None.*str"),
    ("num_items_in_batch", True, TypeError, "a number, a tensor with one element or None.*bool"),
    ("num_items_in_batch", -1, ValueError, ">= 0 and finite; got -1"),
    ("num_items_in_batch", float("nan"), ValueError, ">= 0 and finite; got nan"),
    ("num_items_in_batch", float("inf"), ValueError, ">= 0 and finite; got inf"),
    ("num_items_in_batch", 10**400, ValueError, "fit a float; got a number beyond its range"),
    ("num_items_in_batch", torch.ones(2), ValueError, r"one element; got shape \[2\]"),
    ("num_items_in_batch", torch.ones(1).to(torch.complex64), ValueError, "dtype"),
    ("num_items_in_batch", torch.tensor(True), ValueError, "a number's dtype; got torch.bool"),
    ("gradient_accumulation_steps", 0, ValueError, "an int > 0; got 0"),
    ("gradient_accumulation_steps", -2, ValueError, "an int > 0; got -2"),
    ("gradient_accumulation_steps", 2.0, TypeError, "an int > 0; got 2.0 of type float"),
    ("gradient_accumulation_steps", None, TypeError, "an int > 0; got None"),
    ("gradient_accumulation_steps", True, TypeError, "an int > 0; got True of type bool"),
    ("temperature", 0.0, ValueError, "> 0 and finite; got 0.0"),
    ("temperature", -0.5, ValueError, "> 0 and finite; got -0.5"),
    ("temperature", "warm", TypeError, "a number > 0 and finite; got 'warm' of type str"),
    ("entropy_coef", float("inf"), ValueError, "finite; got inf"),
    ("entropy_coef", 10**400, ValueError, "fit a float; got a number beyond its range"),
    ("entropy_coef", "0.1", TypeError, "a number finite; got '0.1' of type str"),
    ("entropy_coef", torch.ones(2), ValueError, r"one element; got shape \[2\]"),
]


@pytest.mark.parametrize(("name", "value", "error", "match"), OTHERS, ids=str)
def test_arguments_that_are_no_data(name: str, value, error, match: str) -> None:
    refused(error, f"^{name} must .*{match}", **{name: value})


def test_bad_values_are_found_before_anything_is_written() -> None:
    bad = [
        {"action_ids": torch.full((B, T), V)},
        {"action_ids": torch.full((B, T), -1)},
        {"temperature": torch.tensor([1.0, -1.0])},
        {"temperature": torch.tensor([1.0, torch.nan])},
    ]
    for changed in bad:
        (name,) = changed
        given = arguments() | changed
        before = copy.deepcopy({k: v.detach() for k, v in given.items()})
        with pytest.raises(ValueError, match=f"^{name} must"):
            FusedLinearRatioKLLoss(process_group="local")(**given)
        for key, value in before.items():
            assert torch.equal(given[key].detach().nan_to_num(), value.nan_to_num())


def test_a_vocab_size_beyond_the_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="^vocab_size must be at most .* 7; got 8"):
        FusedLinearRatioKLLoss(vocab_size=8)(**arguments())


@pytest.mark.parametrize(
    "value", [36, 36.0, np.int64(36), np.float32(36), torch.tensor(36), torch.tensor([36.0])]
)
def test_items_of_any_kind_of_number(value) -> None:
    items = read_items(value, torch.device("cpu"))
    assert float(items) == 36
    assert not isinstance(items, torch.Tensor) or items.shape == ()
    config = RatioKLConfig(loss_type="dapo")
    given = problem(2, config, dtype=torch.float32)
    plain = run(FusedLinearRatioKLLoss(config), given.given(num_items_in_batch=36))
    typed = run(FusedLinearRatioKLLoss(config), given.given(num_items_in_batch=value))
    assert typed.loss.dtype == torch.float32
    assert torch.equal(plain.loss, typed.loss)


def test_no_items_is_none() -> None:
    assert read_items(None, torch.device("cpu")) is None


@pytest.mark.parametrize("name", ["advantages", *LOGPS, "sampling_ratio", "temperature"])
def test_arguments_are_constants_of_the_loss(name: str) -> None:
    config = RatioKLConfig(beta=0.1, off_policy_mask_threshold=0.1, entropy_coef=0.1)
    shapes = {"sampling_ratio": "token", "temperature": "token", "advantages": "token"}
    given = problem(3, config, poison=False, sampling_logps=True, **shapes)
    tensor = {**given.options, "advantages": given.inputs[4]}[name].clone().requires_grad_()
    given = (
        given.with_inputs(advantages=tensor)
        if name == "advantages"
        else given.given(**{name: tensor})
    )
    out = FusedLinearRatioKLLoss(config)(*given.inputs, **given.options)
    out.loss.backward()
    assert tensor.grad is None
    assert given.hidden.grad.any()


def test_a_sampling_ratio_of_one_row_each_is_per_token_only_where_it_says_so() -> None:
    # [B, T] holds a weight a token, whose logarithms vespo adds up; [B] holds one a sequence.
    config = RatioKLConfig(loss_type="vespo")
    given = problem(4, config, poison=False).given(old_logps=None)
    s = torch.rand(6).double() + 0.5
    once, column, spread = (
        run(FusedLinearRatioKLLoss(config), given.given(sampling_ratio=x)).outputs["phi"]
        for x in (s, s[:, None], s[:, None].expand(6, 16))
    )
    assert torch.equal(once, column)
    assert not torch.equal(once, spread)


def test_any_non_zero_mask_is_active() -> None:
    given = problem(1)
    weights = torch.where(given.active, torch.tensor([-1.0, 0.5, 3.0])[torch.arange(16) % 3], 0)
    wanted = run(FusedLinearRatioKLLoss(), given)
    actual = run(FusedLinearRatioKLLoss(), given.with_inputs(attention_mask=weights))
    assert torch.equal(actual.loss, wanted.loss)
    assert torch.equal(actual.grads["hidden"], wanted.grads["hidden"])

"""Every public call, every argument, every hostile value: the right result, or an error that
names the argument. calls.py is the table; docs/robustness.md says it in words."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from robustness.calls import CALLS, HOSTILE, Call, made

PAIRS = [
    pytest.param(call, name, hostile, id=f"{title}-{name}-{what}")
    for title, call in CALLS.items()
    for name, kind in call.kinds.items()
    for what, hostile in HOSTILE.items()
    if kind in hostile.kinds
]


def numbers(result: Any) -> list[Tensor]:
    """The tensors of a result, nested ones too."""
    if isinstance(result, Tensor):
        return [result]
    return [x for part in result if part is not None for x in numbers(part)]


@pytest.mark.parametrize(("call", "name", "hostile"), PAIRS)
def test_one_hostile_argument(call: Call, name: str, hostile) -> None:
    good = call.good()
    hostile_value = hostile.make(good[name])
    given = good | {name: hostile_value}
    if hostile.outcome == "refused":
        with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
            call.function(**given)
        return
    result = numbers(call.function(**given))
    if hostile.outcome == "visible":
        assert not all(x.isfinite().all() for x in result if x.is_floating_point())
        return
    for actual, wanted in zip(result, numbers(call.function(**good)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6, equal_nan=False)
        assert (
            not actual.requires_grad or wanted.requires_grad or call.kinds[name] in ("rows", "leaf")
        )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        pytest.param(call, name, id=f"{title}-{name}")
        for title, call in CALLS.items()
        for name in call.kinds
    ],
)
def test_none_is_refused_where_it_means_nothing(call: Call, name: str) -> None:
    given = call.good() | {name: None}
    if name in call.optional:
        call.function(**given)
        return
    if name == "cu_seqlens":  # its absence makes the input padded, and hidden of a wrong shape
        name = "hidden"
    if name in ("ref_logps", "ref_hidden"):
        name = "reference"
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        call.function(**given)


def test_every_argument_of_every_public_function_is_in_the_table() -> None:
    missing = []
    groups = {"tp_group", "tp_hidden_grad"}  # test/distributed
    for function in {getattr(c.function, "func", c.function) for c in CALLS.values()}:
        title = getattr(function, "__name__", type(function).__name__)
        signature = inspect.signature(getattr(function, "forward", function))
        known = {
            name
            for other, call in CALLS.items()
            if other.split(",")[0] == title
            for name in call.kinds
        }
        shared = set(CALLS["linear_logprob"].kinds) if title == "linear_ratio_kl" else set()
        missing += [
            f"{title}: {name}" for name in set(signature.parameters) - known - shared - groups
        ]
    assert not missing


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


TENSOR_ARGUMENTS = [
    pytest.param(call, name, id=f"{title}-{name}")
    for title, call in CALLS.items()
    for name in call.kinds
    if isinstance(call.good()[name], Tensor)
]


@pytest.mark.parametrize(("call", "name"), TENSOR_ARGUMENTS)
def test_a_dtensor_is_refused(call: Call, name: str, mesh) -> None:
    """Its local shard would be read as the whole."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    good = call.good()
    given = good | {name: distribute_tensor(good[name], mesh, [Replicate()])}
    with pytest.raises(ValueError, match=rf"\b{name}\b is a DTensor"):
        call.function(**given)


@pytest.mark.parametrize(("call", "name"), TENSOR_ARGUMENTS)
def test_a_functorch_transform_is_refused(call: Call, name: str) -> None:
    """No transform has a rule for the operators: torch's own message would not say so."""
    good = call.good()

    def function(value: Tensor) -> Tensor:
        return numbers(call.function(**good | {name: value}))[0].sum()

    with pytest.raises(ValueError, match=rf"\b{name}\b is inside a torch.func transform"):
        torch.func.vmap(function)(good[name].unsqueeze(0))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_functorch_derivatives_are_refused(transform) -> None:
    given = made("weight", "action_ids")
    function = partial(linear_logprob, **given)
    with pytest.raises(ValueError, match=r"\bhidden\b is inside a torch.func transform"):
        transform(lambda hidden: function(hidden).logps.sum())(torch.randn(2, 3, 4))


def test_a_forward_mode_derivative_is_refused() -> None:
    """It was dropped without a word: the result had no tangent."""
    given = made("hidden", "weight", "action_ids")
    with torch.autograd.forward_ad.dual_level():
        given["hidden"] = torch.autograd.forward_ad.make_dual(given["hidden"], torch.ones(2, 3, 4))
        with pytest.raises(ValueError, match=r"\bhidden\b carries a forward-mode tangent"):
            linear_logprob(**given)


def test_inference_mode_gives_the_same_numbers() -> None:
    for title, call in CALLS.items():
        good = call.good()
        wanted = numbers(call.function(**good))
        with torch.inference_mode():
            actual = numbers(call.function(**good))
        for a, b in zip(actual, wanted, strict=True):
            assert torch.equal(a, b), title


def test_tokens_that_inference_mode_made_can_be_trained_on() -> None:
    """Rollouts are made there: their ids could not be saved for backward."""
    with torch.inference_mode():
        rollout = made("action_ids", "attention_mask", "advantages", "old_logps", "ref_logps")
    leaves = made("hidden", "weight")
    for leaf in leaves.values():
        leaf.requires_grad_()
    FusedLinearRatioKLLoss(beta=0.1)(**leaves, **rollout).loss.backward()
    plain = {name: value.clone() for name, value in rollout.items()}
    again = FusedLinearRatioKLLoss(beta=0.1)(**leaves, **plain).loss
    wanted = torch.autograd.grad(again, list(leaves.values()))
    for leaf, grad in zip(leaves.values(), wanted, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_meta_tensors_alone_are_refused() -> None:
    given = {
        name: value.to("meta") for name, value in made("hidden", "weight", "action_ids").items()
    }
    with pytest.raises(ValueError, match="hidden is on the meta device"):
        linear_logprob(**given)


def test_overlapping_leaves_get_the_gradient_of_each_place() -> None:
    """hidden of which every row is the same memory: the gradient has a row for each."""
    row = torch.randn(1, 1, 4, dtype=torch.float64).requires_grad_()
    given = made("action_ids")
    weight = torch.randn(7, 4, dtype=torch.float64)
    linear_logprob(row.expand(2, 3, 4), weight, **given).logps.sum().backward()
    actual = row.grad.clone()
    row.grad = None
    linear_logprob(row.repeat(2, 3, 1), weight, **given).logps.sum().backward()
    torch.testing.assert_close(actual, row.grad, rtol=1e-12, atol=1e-12)


def test_the_page_names_every_hostile_value() -> None:
    page = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text(encoding="utf-8")
    assert [what for what in HOSTILE if f"| {what} |" not in page] == []

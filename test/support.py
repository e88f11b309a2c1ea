"""Seeded problems for the oracle and the module, how to run both, and how to compare them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig
from ratio_kl.reference import reference_logprob, reference_loss

PER_TOKEN_OUTPUTS = ("logps", "entropies", "ratio", "kl", "low_clipped", "high_clipped", "phi")

BACKENDS = ("torch", pytest.param("triton", marks=pytest.mark.interpreter))
"""The backends on CPU tensors, for parametrize."""

FLOAT64_TOLERANCE = 1e-10
"""Two orders of summation in float64 differ by about 1e-14 here; 1e-10 still sees any mistake."""
FLOAT32_TOLERANCE = 1e-5
"""About 100 float32 roundings."""


@dataclass(frozen=True)
class Problem:
    """Inputs of one call: `inputs` in the order of the module's arguments, the rest by name."""

    inputs: tuple[Tensor, ...]
    """hidden, weight, action_ids, attention_mask, advantages."""
    options: dict[str, Any]
    """Everything passed by keyword, bias among it."""

    @property
    def hidden(self) -> Tensor:
        return self.inputs[0]

    @property
    def active(self) -> Tensor:
        return self.inputs[3] != 0

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors whose gradients are compared."""
        leaves = {"hidden": self.inputs[0], "weight": self.inputs[1]}
        return leaves if "bias" not in self.options else leaves | {"bias": self.options["bias"]}

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Problem":
        """The same numbers in `dtype`, as fresh leaves. Exact when `dtype` is a wider one."""

        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            kept = value.dtype if not value.is_floating_point() else dtype
            return value.detach().to(device, kept).requires_grad_(value.requires_grad)

        return Problem(
            tuple(cast(value) for value in self.inputs),
            {name: cast(value) for name, value in self.options.items()},
        )

    def given(self, **options: Any) -> "Problem":
        """The same problem with some keywords added or replaced; None takes one away."""
        merged = self.options | options
        return replace(self, options={k: v for k, v in merged.items() if v is not None})

    def with_inputs(self, **inputs: Tensor) -> "Problem":
        """The same problem with some of hidden, weight, action_ids, ... replaced."""
        names = ("hidden", "weight", "action_ids", "attention_mask", "advantages")
        assert set(inputs) <= set(names)
        kept = zip(names, self.inputs, strict=True)
        return replace(self, inputs=tuple(inputs.get(name, value) for name, value in kept))


def problem(
    seed: int,
    config: RatioKLConfig | None = None,
    *,
    B: int = 6,
    T: int = 16,
    H: int = 8,
    V: int = 150,
    active: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    bias: bool = False,
    reference: str = "logps",
    advantages: str = "sequence",
    sampling_ratio: str | None = None,
    sampling_logps: bool = False,
    temperature: str | None = None,
    poison: bool = True,
) -> Problem:
    """A random problem in which every branch of the loss is taken.

    The default size is the smallest that is cut into several tiles both ways (a tile has at least
    64 rows and 64 columns). The last sequence is empty. Old log-probs lie around the policy's own,
    as `config` modifies them, so far away that tokens and sequences fall on both sides of every
    clip bound for advantages of either sign; one sequence has advantage 0.

    Args:
        active: number of active tokens; the default makes no quantile of 0.2, 0.5, 0.8 fall
            exactly on a token, where rounding decides.
        reference: "logps", "hidden" (with weight and bias), "hidden_only" or "none".
        advantages, sampling_ratio, temperature: shape of the argument: "sequence" [B], "column"
            [B, 1] or "token" [B, T]; None leaves the two optional ones out.
        poison: put NaN, inf and impossible ids at the inactive places.
    """
    config = config or RatioKLConfig()
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    mask = _mask(B, T, active, generator)
    ids = torch.randint(0, config.vocab_size or V, (B, T), generator=generator)
    hidden, weight = normal(B, T, H), normal(V, H)
    options: dict[str, Any] = {"bias": normal(V)} if bias else {}
    if temperature is not None:
        options["temperature"] = _shaped(temperature, 0.7 + normal(B, T).abs())
    # Rounded to dtype before anything is derived from them: every run sees the same numbers.
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    logps, _ = reference_logprob(
        hidden,
        weight,
        ids,
        bias=options.get("bias"),
        temperature=options.get("temperature", config.temperature),
        logit_scale=config.logit_scale,
        softcap=config.softcap,
        vocab_size=config.vocab_size,
    )
    drift = torch.tensor([-0.5, 0.5, 0.5, -0.5, 0.0]).double()
    gain = torch.tensor([-1.0, 1.5, -0.5, 1.0, 0.0]).double()
    cycle = torch.arange(B) % len(drift)
    options["old_logps"] = logps - drift[cycle, None] - 0.4 * normal(B, T)
    A = gain[cycle, None].expand(B, T)
    if advantages == "token":
        A = A * (1 + 0.1 * normal(B, T)) + 0.2 * normal(B, T)
    options |= _reference(reference, logps, hidden, weight, options.get("bias"), normal)
    if sampling_ratio is not None:
        options["sampling_ratio"] = _shaped(sampling_ratio, (0.3 * normal(B, T)).exp())
    if sampling_logps:
        options["sampling_logps"] = options["old_logps"] + 0.3 * normal(B, T)

    inputs = (hidden, weight, ids, mask, _shaped(advantages, A))
    if poison:
        inputs, options = _poisoned(inputs, options, mask, V)
    made = Problem(inputs, options).to(dtype, device)
    for leaf in made.leaves.values():
        leaf.requires_grad_()
    return made


def _mask(B: int, T: int, active: int | None, generator: torch.Generator) -> Tensor:
    """[B, T] bool: nothing in the last sequence (if there are several), holes in the others."""
    places = max(1, B - 1) * T
    if active is None:
        most = places * 9 // 10
        active = next((n for n in range(most, 1, -1) if (n - 1) % 10 in (1, 3, 7, 9)), places)
    mask = torch.zeros(B * T, dtype=torch.bool)
    mask[torch.randperm(places, generator=generator)[:active]] = True
    return mask.view(B, T)


def _shaped(shape: str, value: Tensor) -> Tensor:
    return {"sequence": value[:, 0], "column": value[:, :1], "token": value}[shape]


def _reference(
    kind: str,
    logps: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normal: Callable[..., Tensor],
) -> dict[str, Tensor]:
    if kind == "none":
        return {}
    if kind == "logps":
        return {"ref_logps": logps + 0.3 * normal(*logps.shape)}
    given = {"ref_hidden": hidden + 0.1 * normal(*hidden.shape)}
    if kind == "hidden":
        given["ref_weight"] = weight + 0.1 * normal(*weight.shape)
        if bias is not None:
            given["ref_bias"] = bias + 0.1 * normal(*bias.shape)
    return given


def _poisoned(
    inputs: tuple[Tensor, ...], options: dict[str, Any], mask: Tensor, V: int
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """NaN and +-inf in every float, impossible ids, wherever a token or sequence is inactive.

    Temperatures stay: their values are checked, and an inactive one is no less wrong for that.
    """
    B, T = mask.shape
    cycle = torch.arange(B * T).view(B, T)
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf]).double()[cycle % 3]
    junk_ids = torch.tensor([-100, V, -1, 2**31 - 1])[cycle % 4]

    def spoil(name: str, value: Tensor) -> Tensor:
        if name in ("weight", "bias", "ref_weight", "ref_bias", "temperature", "mask"):
            return value
        if not value.is_floating_point():
            return torch.where(mask, value, junk_ids)
        if value.shape[:2] == (B, T):
            grow = (B, T) + (1,) * (value.dim() - 2)
            return torch.where(mask.view(grow), value, junk.view(grow))
        return torch.where(mask.any(1).view(value.shape), value, junk[:, 0].view(value.shape))

    names = ("hidden", "weight", "ids", "mask", "advantages")
    spoilt = tuple(spoil(name, value) for name, value in zip(names, inputs, strict=True))
    return spoilt, {name: spoil(name, value) for name, value in options.items()}


@dataclass(frozen=True)
class Result:
    """What a run gave: the loss, metrics and per-token outputs by name, gradients by leaf."""

    loss: Tensor
    metrics: dict[str, Tensor]
    outputs: dict[str, Tensor | None]
    grads: dict[str, Tensor]


def config_of(loss_type: str = "grpo", level: str = "token", **options: Any) -> RatioKLConfig:
    """A config of any loss type and level; of the clip bounds cispo has one, and names it."""
    return RatioKLConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_high=1.3 if loss_type == "cispo" else 0.28,
        max_completion_length=17,
        **options,
    )


def module(config: RatioKLConfig, **knobs: Any) -> FusedLinearRatioKLLoss:
    """The loss of this process alone."""
    return FusedLinearRatioKLLoss(config, process_group="local", **knobs)


def run(loss_fn: Callable[..., Any], given: Problem) -> Result:
    """Forward and backward of `loss_fn(*inputs, **options)`."""
    out = loss_fn(*given.inputs, **given.options)
    leaves = given.leaves
    grads = torch.autograd.grad(out.loss, list(leaves.values()))
    metrics = out.metrics if isinstance(out.metrics, dict) else out.metrics._asdict()
    return Result(
        loss=out.loss.detach(),
        metrics=metrics,
        outputs={name: getattr(out, name) for name in PER_TOKEN_OUTPUTS},
        grads=dict(zip(leaves, grads, strict=True)),
    )


def run_reference(config: RatioKLConfig, given: Problem, **extra: Any) -> Result:
    """Forward and backward of the oracle; `extra` is what only the oracle takes."""

    def loss_fn(*inputs: Tensor, **options: Any) -> Any:
        return reference_loss(config, *inputs, **options, **extra)

    return run(loss_fn, given)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; the plain norm where expected is 0."""
    actual, expected = actual.detach().double(), expected.detach().double()
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size or 1.0)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Same shape; the error is at most `tolerance` of the norm, and of the largest entry."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{what}: relative error {error:.3g} > {tolerance:.3g}"
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.numel():
        worst = (actual - expected).abs().max().item()
        largest = expected.abs().max().item() or 1.0
        assert worst <= tolerance * largest, f"{what}: worst entry off by {worst:.3g}"


def assert_same(
    actual: Result, expected: Result, tolerance: float, *, loss_size: float = 0.0
) -> None:
    """Loss, metrics, outputs and gradients agree to `tolerance`.

    Args:
        loss_size: the loss and its metric may be off by `tolerance * loss_size` beside: terms of
            both signs cancel in the sum, and their rounding does not.
    """
    for name, value in {"loss": expected.loss, **expected.metrics}.items():
        got = actual.loss if name == "loss" else actual.metrics[name]
        size = max(abs(value.item()), loss_size if "loss" in name else 0.0)
        error = abs(got.item() - value.item())
        assert error <= tolerance * size, f"{name}: {got.item()} != {value.item()}"
    assert set(actual.metrics) == set(expected.metrics)
    for name, wanted in expected.outputs.items():
        got_output = actual.outputs[name]
        if wanted is None or got_output is None:
            assert wanted is got_output, f"{name}: only one of them is None"
        else:
            assert_close(got_output, wanted, tolerance, name)
    for name, wanted_grad in expected.grads.items():
        assert actual.grads[name].dtype == wanted_grad.dtype or tolerance > FLOAT64_TOLERANCE
        assert_close(actual.grads[name], wanted_grad, tolerance, f"{name}.grad")

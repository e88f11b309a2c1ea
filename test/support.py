"""Seeded problems for the oracle and the module, how to run both, and how to compare them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ratio_kl.config import RatioKLConfig
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


class PolicyCase(NamedTuple):
    """One token with log-prob log 0.5: options, ratio and advantage in; loss and slope out."""

    options: dict[str, Any]
    ratio: float
    advantage: float
    loss: float
    slope: float
    """dloss / dlogp, through the ratio and directly."""


LN2 = 0.6931471805599453

_CLIP = {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.28}
_CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
_SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}

POLICY_CASES = [
    # clip: -min(r A, clamp(r, 0.8, 1.28) A); the slope is -r A where the unclamped side wins.
    PolicyCase(_CLIP, 0.5, 2.0, -1.0, -1.0),
    PolicyCase(_CLIP, 1.1, 2.0, -2.2, -2.2),
    PolicyCase(_CLIP, 1.5, 2.0, -2.56, 0.0),
    PolicyCase(_CLIP, 0.5, -2.0, 1.6, 0.0),
    PolicyCase(_CLIP, 1.1, -2.0, 2.2, 2.2),
    PolicyCase(_CLIP, 1.5, -2.0, 3.0, 3.0),
    PolicyCase(_CLIP, 1.5, 0.0, 0.0, 0.0),
    # At the exact bound r = 1 the gradient passes.
    PolicyCase(_CLIP | {"epsilon_low": 0.0, "epsilon_high": 0.0}, 1.0, 2.0, -2.0, -2.0),
    PolicyCase(_CLIP | {"epsilon_low": 0.0, "epsilon_high": 0.0}, 1.0, -2.0, 2.0, 2.0),
    # delta caps the unclamped side: dual clip above 1.28, and below it a cap for both signs.
    PolicyCase(_CLIP | {"delta": 1.4}, 1.5, -2.0, 2.8, 0.0),
    PolicyCase(_CLIP | {"delta": 1.4}, 1.3, -2.0, 2.6, 2.6),
    PolicyCase(_CLIP | {"delta": 1.4}, 1.5, 2.0, -2.56, 0.0),
    PolicyCase(_CLIP | {"delta": 1.4}, 0.5, -2.0, 1.6, 0.0),
    PolicyCase(_CLIP | {"delta": 1.05}, 1.1, 2.0, -2.1, 0.0),
    PolicyCase(_CLIP | {"delta": 1.05}, 1.1, -2.0, 2.2, 2.2),
    PolicyCase(_CLIP | {"delta": 1.0}, 1.0, 2.0, -2.0, -2.0),
    # cispo: -min(r, 1.3) A log 0.5, slope -min(r, 1.3) A; no lower bound.
    PolicyCase(_CISPO, 0.5, 2.0, LN2, -1.0),
    PolicyCase(_CISPO, 1.0, 2.0, 2 * LN2, -2.0),
    PolicyCase(_CISPO, 2.0, 2.0, 2.6 * LN2, -2.6),
    PolicyCase(_CISPO, 0.5, -2.0, -LN2, 1.0),
    PolicyCase(_CISPO, 2.0, -2.0, -2.6 * LN2, 2.6),
    # sapo: -sigmoid(tau (r - 1)) 4 / tau A; slope -4 sigmoid (1 - sigmoid) A r.
    PolicyCase(_SAPO, 0.5, 2.0, -3.0203253503851633, -0.940014848806378),
    PolicyCase(_SAPO, 1.0, 2.0, -4.0, -2.0),
    PolicyCase(_SAPO, 2.0, 2.0, -5.848468629040039, -3.1457909318637097),
    PolicyCase(_SAPO, 0.5, -2.0, 2.831876660606733, 0.9341398232853926),
    PolicyCase(_SAPO, 1.0, -2.0, 3.8095238095238093, 2.0),
    PolicyCase(_SAPO, 2.0, -2.0, 5.64399923186403, 3.072439166781177),
    PolicyCase(_SAPO, 2.0, 0.0, 0.0, 0.0),
    # vespo with one token: w = r, phi = exp(lambda + k log w - lambda w), -phi A log 0.5.
    # A >= 0: k = 2, lambda = 3; else k = 3, lambda = 2.
    PolicyCase({"loss_type": "vespo"}, 1.0, 2.0, 2 * LN2, -2.0),
    PolicyCase({"loss_type": "vespo"}, 2.0, 2.0, 2 * 0.199148273471456 * LN2, -0.398296546942912),
    PolicyCase({"loss_type": "vespo"}, 0.5, 2.0, 2 * 1.1204222675845162 * LN2, -2.2408445351690324),
    PolicyCase({"loss_type": "vespo"}, 2.0, -2.0, -2 * 1.0826822658929016 * LN2, 2.165364531785803),
    PolicyCase({"loss_type": "vespo"}, 0.5, -2.0, -2 * 0.3397852285573806 * LN2, 0.679570457114761),
]

CLIP_BOUND_CASES = [
    # The ratio given directly, so that it hits the bound to the last bit: the gradient passes.
    PolicyCase(_CLIP, 0.8, 2.0, -1.6, -1.6),
    PolicyCase(_CLIP, 0.8, -2.0, 1.6, 1.6),
    PolicyCase(_CLIP, 1.28, 2.0, -2.56, -2.56),
    PolicyCase(_CLIP, 1.28, -2.0, 2.56, 2.56),
    PolicyCase(_CLIP | {"delta": 1.4}, 1.4, -2.0, 2.8, 2.8),
]


class KLCase(NamedTuple):
    """delta = ref_logps - logps in; the estimate and its derivative in delta out."""

    estimator: str
    limit: float | None
    delta: float
    kl: float
    slope: float


KL_CASES = [
    KLCase("k1", 20.0, 0.0, 0.0, -1.0),
    KLCase("k1", 20.0, 0.5, -0.5, -1.0),
    KLCase("k1", 20.0, -1.0, 1.0, -1.0),
    KLCase("k2", 20.0, 0.0, 0.0, 0.0),
    KLCase("k2", 20.0, 0.5, 0.125, 0.5),
    KLCase("k2", 20.0, -1.0, 0.5, -1.0),
    KLCase("k3", 20.0, 0.0, 0.0, 0.0),
    KLCase("k3", 20.0, 0.5, 0.14872127070012815, 0.6487212707001282),
    KLCase("k3", 20.0, -1.0, 0.36787944117144233, -0.6321205588285577),
    KLCase("k3", None, 0.5, 0.14872127070012815, 0.6487212707001282),
    # Beyond the limit only k3 is clamped, in both places, and then flat.
    KLCase("k1", 20.0, 30.0, -30.0, -1.0),
    KLCase("k2", 20.0, -30.0, 450.0, -30.0),
    KLCase("k3", 20.0, 30.0, 485165174.4097903, 0.0),
    KLCase("k3", 20.0, -30.0, 19.000000002061153, 0.0),
    KLCase("k3", None, 30.0, 10686474581493.463, 10686474581523.463),
    KLCase("k3", 0.5, 3.0, 0.14872127070012815, 0.0),
]


REDUCED_MASK = [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
REDUCED_TERMS = [[1.0, 0, 0], [3.0, 3.0, 6.0], [0, 0, 0]]
REDUCED = {
    "grpo": (1 / 1 + 12 / 3 + 0) / 3,
    "sapo": (1 / 1 + 12 / 3 + 0) / 3,
    "bnpo": 13 / 4,
    "dr_grpo": 13 / (3 * 5),
    "dapo": 13 / 4,
    "cispo": 13 / 4,
    "vespo": 13 / 4,
    "luspo": 13 / 3,
}
"""Loss of sequences of 1, 3 and 0 tokens with the terms above, for max_completion_length 5."""

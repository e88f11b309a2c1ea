"""Random heads, and the two numbers a token with their gradients in float64 over full logits."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ratio_kl.ops.contract import DEFAULT_CHUNK_BYTES, Gradients, Head, Needs, Saved, Scores, Want
from ratio_kl.ops.triton import linear as triton_backend

ALL = Needs(hidden=True, weight=True, bias=True)
MODIFIERS = ("bias", "logit_scale", "softcap", "temperature", "vocab_size")


class Case(NamedTuple):
    """A head and what else the two passes take."""

    head: Head
    ids: Tensor
    mask: Tensor | None
    grad_logps: Tensor | None
    grad_entropies: Tensor | None


def with_head(case: Case, **changes: Any) -> Case:
    """The case with some fields of its head replaced."""
    return case._replace(head=dataclasses.replace(case.head, **changes))


def make_case(
    N: int,
    V: int,
    H: int,
    *,
    modifiers: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    mask: bool = False,
    entropy: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Standard normal hidden states, logits of variance 1; every named modifier is active."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    def ints(high: int) -> Tensor:
        return torch.randint(high, (N,), generator=random, device=device)

    vocab_size = max(V - 3, 1) if "vocab_size" in modifiers else V
    head = Head(
        hidden=normal(N, H).to(dtype),
        weight=(normal(V, H) * H**-0.5).to(dtype),
        bias=normal(V).to(dtype) if "bias" in modifiers else None,
        inverse_temperature=1 / (0.5 + normal(N).abs()) if "temperature" in modifiers else None,
        logit_scale=torch.tensor(0.7, device=device) if "logit_scale" in modifiers else None,
        softcap=torch.tensor(2.0, device=device) if "softcap" in modifiers else None,
        vocab_size=vocab_size,
        compute_dtype=dtype,
        chunk_bytes=chunk_bytes,
    )
    active = ints(3) > 0 if mask else None
    grad_logps = normal(N) * (ints(4) > 0)
    grad_entropies = normal(N) * (ints(4) > 0) if entropy else None
    if active is not None:
        grad_logps = grad_logps * active
        grad_entropies = grad_entropies * active if grad_entropies is not None else None
    return Case(head, ints(vocab_size), active, grad_logps, grad_entropies)


def run(case: Case, needs: Needs = ALL, with_entropy: bool = True) -> tuple[Scores, Gradients]:
    """Both passes of the Triton backend."""
    scores = triton_backend.forward(case.head, case.ids, case.mask, want=Want(with_entropy))
    saved = Saved(case.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)
    return scores, triton_backend.backward(
        case.head, saved, case.grad_logps, case.grad_entropies, needs=needs
    )


class Expected(NamedTuple):
    """What the float64 computation gives; rows off the mask are 0."""

    logps: Tensor
    entropies: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def expected(case: Case) -> Expected:
    """Float64 on the same inputs, over the active rows' full logits."""
    head = case.head
    active = torch.ones_like(case.ids, dtype=torch.bool) if case.mask is None else case.mask
    hidden = head.hidden[active].detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    if head.logit_scale is not None:
        z = z * head.logit_scale.double()
    if head.softcap is not None:
        z = head.softcap.double() * torch.tanh(z / head.softcap.double())
    if head.inverse_temperature is not None:
        z = z * head.inverse_temperature.double().expand(active.shape)[active, None]
    log_p = torch.log_softmax(z[:, : head.vocab_size], -1)
    logps = log_p.gather(1, case.ids[active, None].long())[:, 0]
    p_log_p = torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p.clamp(-1e4))
    entropies = -p_log_p.sum(-1)
    total = (logps * 0).sum()
    for value, grad in ((logps, case.grad_logps), (entropies, case.grad_entropies)):
        if grad is not None:
            total = total + (value * grad[active].double()).sum()
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    d_hidden, *d_head = torch.autograd.grad(total, leaves)

    def spread(rows: Tensor) -> Tensor:
        out = rows.new_zeros(active.shape + rows.shape[1:])
        out[active] = rows.detach()
        return out

    return Expected(
        spread(logps),
        spread(entropies),
        spread(d_hidden),
        d_head[0],
        d_head[1] if bias is not None else None,
    )


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference; NaN never passes a bound."""
    norm = reference.double().norm().item()
    error = (actual.double() - reference.double()).norm().item()
    return error / norm if norm > 0 else error


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Relative Frobenius error of gradients: dz and the result are each rounded once."""


def assert_right(case: Case, tolerance: float | None = None) -> tuple[Scores, Gradients]:
    """Scores to 5e-6, gradients to their dtype's tolerance; returns both passes' results."""
    dtype = case.head.compute_dtype
    if tolerance is None:
        tolerance = TOLERANCE[dtype]
        if dtype == torch.bfloat16 and case.ids.device.type == "cpu":
            tolerance *= 2  # the interpreter cuts off where a GPU rounds
    result, wanted = run(case), expected(case)
    for name in ("logps", "entropies"):
        error = (getattr(result[0], name) - getattr(wanted, name)).abs().max().item()
        assert error <= 5e-6, f"{name}: off by {error:.3g}"
    for name in ("hidden", "weight", "bias"):
        reference = getattr(wanted, name)
        if reference is not None:
            error = relative_error(getattr(result[1], name), reference)
            assert error <= tolerance, f"d_{name}: relative error {error:.3g} > {tolerance:.3g}"
    return result

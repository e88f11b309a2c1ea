"""How far a result may be from float64: bounds that follow from the sizes of the numbers."""

from typing import NamedTuple

import torch
from torch import Tensor

from properties.draws import HeadCall, in_float64
from ratio_kl import LogProbs
from ratio_kl.reference import reference_logprob

ROUNDING = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Relative error of one rounding; of half precision twice a GPU's: the interpreter cuts off."""


class Exact(NamedTuple):
    """What float64 gives, and what a result in another dtype may be off by."""

    logps: Tensor
    entropies: Tensor
    grads: list[Tensor]
    score_error: float
    grad_errors: list[float]


def leaf_gradients(call: HeadCall, logps: Tensor, entropies: Tensor, seed: int) -> list[Tensor]:
    """Gradients of a random weighted sum of both, some weights 0."""
    random = torch.Generator().manual_seed(seed + 9)

    def weights() -> Tensor:
        drawn = torch.randn(logps.shape, generator=random, dtype=torch.float64)
        drawn = torch.where(torch.rand(logps.shape, generator=random) < 0.3, 0.0, drawn)
        return drawn.to(logps)

    total = (weights() * logps).sum() + (weights() * entropies).sum()
    return list(torch.autograd.grad(total, call.leaves))


def exact_head(call: HeadCall, seed: int) -> Exact:
    """The reference in float64, and bounds on the error of float32 sums over the same inputs.

    A logit is off by a few roundings of the sum of |h w| + |b|, a log-probability by twice that,
    its gradient by as much relative to the coefficient; a half-precision leaf adds a rounding of
    dz and one of the result.
    """
    wide = in_float64(call)
    tensors = (wide.hidden, wide.weight, wide.action_ids, wide.attention_mask)
    logps, entropies = reference_logprob(*tensors, **wide.options)
    grads = leaf_gradients(wide, logps, entropies, seed)
    hidden, vocab_size = wide.hidden.detach()[wide.active], wide.options["vocab_size"]
    weight = wide.weight.detach()[:vocab_size]
    tau = torch.as_tensor(wide.options["temperature"], dtype=torch.float64).min().item()
    factor = wide.options["logit_scale"] / tau
    if hidden.numel() == 0:
        return Exact(logps, entropies, grads, 0.0, [0.0] * len(grads))
    size = (hidden.abs() @ weight.abs().T).max().item()
    if wide.options["bias"] is not None:
        bias = wide.options["bias"].detach()[:vocab_size]
        size += bias[bias.isfinite()].abs().max().item()
    size *= factor
    unit = ROUNDING.get(torch.promote_types(call.hidden.dtype, call.weight.dtype), 2.0**-23)
    columns = len(weight)
    score_error = 16 * unit * (1 + size + torch.tensor(columns).log().item())
    narrow = [NARROW.get(leaf.dtype, 0.0) for leaf in (call.hidden, call.weight)]
    compute = NARROW.get(torch.promote_types(call.hidden.dtype, call.weight.dtype), 0.0)
    # |coefficients| stay below 4; an entropy's gradient carries log p, at most `size` large.
    steep = 4 * (2 + size) * factor
    relative = 4 * score_error + 2 * max(compute, *narrow)
    bounds = [
        relative * steep * weight.abs().max().item(),
        relative * steep * len(hidden) ** 0.5 * 4 * hidden.abs().max().item(),
        (relative + NARROW.get(call.weight.dtype, 0.0)) * steep * len(hidden) ** 0.5 * 4,
    ]
    # The smallest float16 is 6e-8.
    return Exact(logps, entropies, grads, score_error, [bound + 2.0**-24 for bound in bounds])


def assert_head_agrees(call: HeadCall, ours: LogProbs, seed: int) -> None:
    """Scores and gradients of `ours` lie within the bounds; inactive tokens are exactly 0."""
    exact = exact_head(call, seed)
    grads = leaf_gradients(call, ours.logps, ours.entropies, seed)
    assert (ours.logps <= 0).all()
    assert (ours.entropies >= 0).all()
    for name in ("logps", "entropies"):
        actual, wanted = getattr(ours, name), getattr(exact, name)
        assert not actual[~call.active].any(), name
        off = (actual.double() - wanted).abs().max().item()
        assert off <= exact.score_error, f"{name}: off by {off:.3g} > {exact.score_error:.3g}"
    assert not grads[0][~call.active].any()
    names = ("hidden", "weight", "bias")
    for name, grad, wanted, leaf, bound in zip(
        names, grads, exact.grads, call.leaves, exact.grad_errors, strict=False
    ):
        assert grad.dtype == leaf.dtype
        assert grad.shape == leaf.shape
        off = (grad.double() - wanted).abs().max().item()
        assert off <= bound, f"{name}.grad: off by {off:.3g} > {bound:.3g}"

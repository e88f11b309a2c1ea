"""The correctness test that goes ahead of each case: ours against the truth, at a reduced size."""

import torch
from torch import Tensor

from .cases import Case
from .logits_problem import LogitsProblem, true_ratio_kl
from .oracle import largest_error, relative_error, truth
from .policy_loss import policy_loss
from .problem import Problem
from .rivals import OURS, load

ROWS = 64
"""Tokens of a sequence that are kept: with 4 sequences, 2 tiles of 128."""
VOCABULARY = 10_000
"""Rows of the head that are kept: more than 4 segments of 2048, the last one cut."""
LOGP_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""Absolute. The inputs' rounding plays no part: the truth is computed from the same inputs."""
GRADIENT_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-3, torch.float16: 4e-3}
"""Relative Frobenius: rounding a gradient to bfloat16 alone is 1.7e-3."""
RATIO_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""Relative to a ratio near 1."""


def failures(case: Case, problem: Problem | LogitsProblem) -> list[str]:
    """What is wrong with ours on this case's own inputs, cut down; nothing if all is right."""
    call = load(OURS, case.job)
    if isinstance(problem, LogitsProblem):
        with torch.no_grad():
            found = call(problem)
        tolerance = RATIO_TOLERANCE[problem.policy.dtype]
        pairs = zip(("ratio", "kl"), found, true_ratio_kl(problem), strict=True)
        errors = {name: largest_error(x, y, problem.mask) for name, x, y in pairs}
        return _beyond(errors, dict.fromkeys(errors, tolerance))

    problem = problem.reduced(ROWS, VOCABULARY)
    dtype = problem.hidden.dtype
    expected = truth(problem, gradients=case.job == "loss")
    with torch.set_grad_enabled(case.job == "loss"):
        out = call(problem)
    errors = {"logps": largest_error(out.logps, expected.logps, problem.mask)}
    limits = {"logps": LOGP_TOLERANCE[dtype]}
    if problem.with_entropy:
        errors["entropies"] = largest_error(out.entropies, expected.entropies, problem.mask)
        limits["entropies"] = LOGP_TOLERANCE[dtype]
    if case.job == "loss":
        wanted = policy_loss(problem, expected.logps, expected.entropies)
        errors["loss"] = abs(out.loss.item() - wanted.item())
        limits["loss"] = LOGP_TOLERANCE[dtype]
        named = _gradients(problem, out.loss)
        for name, gradient in named.items():
            true: Tensor | None = getattr(expected, name)
            assert true is not None
            errors[f"gradient of {name}"] = relative_error(gradient, true)
            limits[f"gradient of {name}"] = GRADIENT_TOLERANCE[dtype]
    return _beyond(errors, limits)


def _gradients(problem: Problem, loss: Tensor) -> dict[str, Tensor]:
    names = ("hidden", "weight")
    return dict(zip(names, torch.autograd.grad(loss, problem.leaves), strict=False))


def _beyond(errors: dict[str, float], limits: dict[str, float]) -> list[str]:
    """Errors that are not within their limits; NaN is not."""
    return [
        f"error of {name} {error:.1e}, allowed {limits[name]:.1e}"
        for name, error in errors.items()
        if not error <= limits[name]
    ]

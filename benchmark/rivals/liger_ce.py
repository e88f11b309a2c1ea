"""Liger's per-token cross entropy of a head, `LigerFusedLinearScaledCrossEntropyFunction`.

On Hopper it runs CuTe DSL kernels (nvidia-cutlass-dsl), elsewhere a chunked fallback in torch.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..problem import IGNORED, Problem
from . import Outcome, refuse


def load(job: str) -> Callable[[Any], Outcome]:
    refuse(job, "loss", "forward")
    module = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def call(problem: Problem) -> Outcome:
        out = function.apply(
            problem.hidden.flatten(0, 1),
            problem.weight,
            problem.targets.flatten(),
            1.0,
            IGNORED,
            1,
            problem.needs_entropy,
        )
        nll, entropies = out if problem.needs_entropy else (out, None)
        shape = problem.mask.shape
        return Outcome(-nll.view(shape), None if entropies is None else entropies.view(shape))

    return call

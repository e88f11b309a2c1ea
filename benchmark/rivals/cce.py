"""Apple's `cut_cross_entropy.linear_cross_entropy` with its default filter of small gradients."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..problem import Problem
from . import Outcome, Unsupported, refuse


def load(job: str) -> Callable[[Any], Outcome]:
    refuse(job, "loss", "forward")
    function = import_module("cut_cross_entropy").linear_cross_entropy

    def call(problem: Problem) -> Outcome:
        if problem.needs_entropy:
            raise Unsupported("gives no entropy")
        if not problem.hidden.is_cuda:
            raise Unsupported("runs on GPUs only")
        nll = function(problem.hidden, problem.weight, problem.targets, reduction="none")
        return Outcome(-nll)

    return call

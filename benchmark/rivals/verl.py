"""verl's Triton head, `verl.utils.kernel.linear_cross_entropy`. It scores inactive tokens too."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from ..problem import Problem
from . import Outcome, Unsupported, refuse


def load(job: str) -> Callable[[Any], Outcome]:
    refuse(job, "loss", "forward")
    function = _kernels_alone().linear_cross_entropy

    def call(problem: Problem) -> Outcome:
        if not problem.hidden.is_cuda:
            raise Unsupported("runs on GPUs only")
        shape = problem.mask.shape
        logps, entropies = function(
            problem.hidden.flatten(0, 1),
            problem.weight,
            problem.action_ids.flatten(),
            1.0,
            "none",
            None,
        )
        return Outcome(logps.view(shape), entropies.view(shape))

    return call


def _kernels_alone() -> ModuleType:
    """The kernel's module without its parent packages, which import ray and a whole trainer."""
    path: list[str] | None = None
    for name in ("verl", "verl.utils"):
        if name not in sys.modules:
            spec = PathFinder.find_spec(name, path)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            package = ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations or ())
            sys.modules[name] = package
        path = list(sys.modules[name].__path__)
    return import_module("verl.utils.kernel.linear_cross_entropy")

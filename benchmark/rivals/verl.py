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
    function = import_alone("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

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


def import_alone(name: str) -> ModuleType:
    """A module of verl without its parent packages' own code, which imports ray and a trainer."""
    path: list[str] | None = None
    parents = name.split(".")[:-1]
    for parent in (".".join(parents[: i + 1]) for i in range(len(parents))):
        if parent not in sys.modules:
            spec = PathFinder.find_spec(parent, path)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {parent!r}", name=parent)
            package = ModuleType(parent)
            package.__path__ = list(spec.submodule_search_locations or ())
            sys.modules[parent] = package
        path = list(sys.modules[parent].__path__)
    return import_module(name)

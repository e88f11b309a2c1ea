"""quack's `chunked_linear_cross_entropy`: the mean cross entropy, gradients made in its forward.

Another job than a policy loss, which weighs each token by its advantage: shown for its speed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..problem import Problem
from . import Outcome, Unsupported, refuse


def load(job: str) -> Callable[[Any], Outcome]:
    refuse(job, "loss")
    function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def call(problem: Problem) -> Outcome:
        if problem.quantile < 1:
            raise Unsupported("has no weight a token")
        hidden, targets = problem.hidden.flatten(0, 1), problem.targets.flatten()
        return Outcome(loss=function(hidden, problem.weight, targets))

    return call

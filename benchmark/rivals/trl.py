"""TRL's fused head: `trl.kernels.ChunkedLogProbFunction`, as `add_fused_lm_head` calls it."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from ..problem import Problem
from . import Outcome, refuse

CHUNK_SIZE = 32_768
"""Columns of a tile, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE in TRL 1.16."""


def load(job: str) -> Callable[[Any], Outcome]:
    refuse(job, "loss", "forward")
    function = import_module("trl.kernels").ChunkedLogProbFunction
    _provide_gather()

    def call(problem: Problem) -> Outcome:
        mask = problem.mask
        active = mask if problem.masked else ...
        outputs = ("log_probs", "entropy") if problem.needs_entropy else ("log_probs",)
        logps, entropies, *_ = function.apply(
            problem.hidden[active].flatten(0, -2),
            problem.weight,
            None,
            problem.action_ids[active].flatten(),
            1.0,
            CHUNK_SIZE,
            None,
            1.0,
            outputs,
        )
        return Outcome(
            _placed(logps, mask), None if entropies is None else _placed(entropies, mask)
        )

    return call


def _placed(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.new_zeros(mask.shape).masked_scatter(mask, rows)


def _provide_gather() -> None:
    """Its backward takes one name from TRL's trainer, which asks for pandas and datasets.

    Where those are absent, give it what that name is without DeepSpeed: a null context.
    """
    try:
        import_module("trl.trainer.utils")
    except Exception:
        for name in ("trl.trainer", "trl.trainer.utils"):
            sys.modules[name] = ModuleType(name)
        names = SimpleNamespace(maybe_gather_lm_head_ctx=lambda *_: nullcontext())
        vars(sys.modules["trl.trainer.utils"]).update(vars(names))

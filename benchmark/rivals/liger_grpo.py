"""Liger's whole GRPO loss, `LigerFusedLinearGRPOLoss`: gradients are made in its forward."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..policy_loss import EPSILON
from ..problem import Problem
from . import Outcome, Unsupported, refuse


def load(job: str) -> Callable[[Any], Outcome]:
    refuse(job, "loss")
    make = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    loss_fn = make(
        beta=0.0,
        use_ref_model=False,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
        loss_type="dapo",
    )

    def call(problem: Problem) -> Outcome:
        if problem.quantile < 1:
            raise Unsupported("has no entropy mask")
        loss, _metrics = loss_fn(
            problem.hidden,
            problem.weight,
            problem.action_ids,
            problem.mask.float(),
            problem.advantages,
        )
        return Outcome(loss=loss)

    return call

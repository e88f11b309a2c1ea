"""Who is measured. Each module holds the call that one library makes, and imports it lazily.

    load(job) -> call(problem) -> Outcome      for the jobs "loss" and "forward"
    load("logits") -> call(logits_problem) -> (ratio, kl)
    load("pass_one"), load("pass_two") -> call(problem) -> Outcome      ours alone

`load` raises ImportError where the library is absent and Unsupported where it has no such job.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, NamedTuple

from torch import Tensor


class Unsupported(Exception):
    """What was asked for is not something that this library does; the message says what."""


class Outcome(NamedTuple):
    """What one call gives. Without `loss`, it is made by `policy_loss` from the rest."""

    logps: Tensor | None = None
    """[B, T]; values on inactive tokens do not matter."""
    entropies: Tensor | None = None
    """[B, T]."""
    loss: Tensor | None = None


@dataclass(frozen=True)
class Contender:
    """A row of the tables."""

    title: str
    package: str | None
    """Distribution on PyPI whose version is stated; None: no package of its own."""
    exact: bool = True
    """Computes this very loss, every token of it: counted in "ahead of"."""
    note: str = ""

    @property
    def version(self) -> str:
        try:
            return metadata.version(self.package) if self.package else ""
        except metadata.PackageNotFoundError:
            return "absent"


OURS = "ours"
CONTENDERS = {
    OURS: Contender("ratio_kl", None),
    "ours_compiled": Contender(
        "ratio_kl, torch.compile", None, exact=False, note="no rival: the same, compiled"
    ),
    "eager": Contender("full logits, eager", None, note="stores all logits"),
    "compiled": Contender("full logits, torch.compile", None, note="stores all logits"),
    "trl": Contender("TRL ChunkedLogProbFunction", "trl", note="logits in the inputs' dtype"),
    "liger_ce": Contender("Liger scaled cross entropy", "liger-kernel", note="CuTe DSL on Hopper"),
    "liger_grpo": Contender("Liger fused linear GRPO", "liger-kernel"),
    "verl": Contender("verl linear_cross_entropy", "verl"),
    "cce": Contender(
        "cut-cross-entropy",
        "cut-cross-entropy",
        exact=False,
        note="leaves out small gradients",
    ),
    "quack": Contender(
        "quack linear cross entropy",
        "quack-kernels",
        exact=False,
        note="mean cross entropy: no weight a token",
    ),
}


def load(name: str, job: str) -> Callable[[Any], Any]:
    """The call of a contender for a job."""
    call: Callable[[Any], Any] = import_module(f".{name}", __package__).load(job)
    return call


def refuse(job: str, *supported: str) -> None:
    """Raise Unsupported unless the job is a supported one."""
    if job not in supported:
        raise Unsupported(f"has no call for the job {job!r}")

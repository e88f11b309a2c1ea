"""The benchmark's main loop: check, then measure every contender on every case and size."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from . import inputs, measure
from .cases import CASES, ROLLOUTS, Case
from .check import failures
from .logits_problem import LogitsProblem, random_logits, true_ratio_kl
from .oracle import Truth, largest_error, relative_error, truth
from .policy_loss import policy_loss
from .problem import Problem, random_like, random_problem
from .results import Row, Run
from .rivals import CONTENDERS, OURS, Outcome, Unsupported, load
from .shapes import Shape

MM = "mm"
PRODUCTS = 4
"""Products that the unit is the mean of: about as much work as forward + backward, because a GPU
runs a short burst after a pause at a higher clock than it can keep up."""
SEED = 0
COPIES = 8
"""At most so many sets of inputs are rotated."""
READY_SECONDS = 90
"""A contender that takes longer to compile for one size is left out."""


@dataclass(frozen=True)
class Plan:
    """What to run; None is the case's own choice."""

    cases: Sequence[str]
    against: Sequence[str] | None
    shapes: Sequence[Shape] | None
    dtype: torch.dtype
    device: torch.device
    out: Path
    inputs: Path | None
    seconds: float
    """Time of one group's rounds."""
    budget: float
    """Past this many seconds nothing new is begun."""


@dataclass(frozen=True)
class Group:
    """One case on one problem: what is timed side by side."""

    name: str
    case: Case
    data: str
    shape: Shape
    problem: Problem | LogitsProblem

    def row(self, contender: str, dtype: torch.dtype, status: str = "ok") -> Row:
        active = self.problem.mask.float().mean().item()
        kind = str(dtype).removeprefix("torch.")
        return Row(self.name, self.data, str(self.shape), kind, contender, status, active=active)


class DeviceLost(Exception):
    """A contender left the GPU in a state in which nothing runs any more."""


def run(plan: Plan, result: Run, console: Console) -> bool:
    """Measure everything into `result`, saved after each group; whether every check passed."""
    start, all_right = monotonic(), True
    for group in groups(plan):
        chosen = plan.against is not None
        names = plan.against if chosen else group.case.rivals(plan.device.type)
        names = (OURS, *(name for name in names if name != OURS))
        reason = ""
        if monotonic() - start > plan.budget:
            reason = f"not run: {plan.budget:.0f} s are over"
        elif wrong := failures(group.case, group.problem):
            reason, all_right = "not reported: the correctness test is red", False
            console.print(f"[bold red]{group.name} {group.shape}: {'; '.join(wrong)}[/]")
        try:
            rows = (
                [group.row(name, plan.dtype, reason) for name in names]
                if reason
                else measure_group(group, names, plan)
            )
        except DeviceLost as lost:
            console.print(f"[bold red]{group.name} {group.shape}: {lost}[/]")
            return False
        result.rows += rows
        result.save(plan.out / "results.json")
        console.print(
            f"{monotonic() - start:5.0f} s  {group.name:15} {group.shape!s:>18} {group.data:8}"
            + "  ".join(f"{row.contender} {_brief(row)}" for row in rows),
            soft_wrap=True,
            highlight=False,
        )
    return all_right


def _brief(row: Row) -> str:
    return f"{row.ms:.4g} ms" if row.ms is not None else f"({row.status[:60]})"


def groups(plan: Plan) -> Iterator[Group]:
    """Problems in turn, each made when its turn comes."""
    for name in plan.cases:
        case = CASES[name]
        for shape in plan.shapes or case.shapes[plan.device.type]:
            maker = random_logits if case.job == "logits" else random_problem
            problem = maker(shape, plan.dtype, plan.device, SEED)
            if isinstance(problem, Problem):
                problem = case.thin(problem, SEED)
            yield Group(name, case, "random", shape, problem)
    if plan.inputs is None:
        return
    real = inputs.load(plan.inputs, plan.dtype, plan.device)
    made = random_like(real, SEED)
    for name, case in ROLLOUTS.items():
        for data, problem in (("SmolLM2", real), ("random", made)):
            if name == "rollouts_dense":
                problem = replace(problem, mask=torch.ones_like(problem.mask))
            yield Group(name, case, data, problem.shape, problem)


def measure_group(group: Group, names: Sequence[str], plan: Plan) -> list[Row]:
    """One row a contender; those that cannot run say why."""
    device = plan.device
    problems = _rotated(group.problem, device)
    expected = _expected(group)
    rows, steps = {}, {}
    for name in names:
        rows[name] = row = group.row(name, plan.dtype)
        try:
            with measure.time_limit(READY_SECONDS):
                step = _step(group.case, load(name, group.case.job), problems)
                _note_errors(row, group, step(0), expected)
                step(len(problems) - 1)
            row.peak_bytes = measure.peak_bytes(step, device)
            steps[name] = step
        except Exception as error:
            row.status = _reason(error)
            _require_device(name, device)
        _release(device)
    del expected
    _release(device)
    steps[MM] = _mm_step(group, plan)
    steps[MM](0)
    times = measure.interleaved(steps, device, plan.seconds)
    for name in (name for name in steps if name != MM):
        time, row = times[name], rows[name]
        row.ms, row.low_ms, row.high_ms, row.rounds = time.median, time.low, time.high, time.rounds
        row.mm = time.median * PRODUCTS / times[MM].median
        if group.case.host and device.type == "cuda":
            row.host_us = measure.host_time(steps[name], device)
    return list(rows.values())


def _require_device(name: str, device: torch.device) -> None:
    """DeviceLost if the GPU no longer answers, as after an illegal address."""
    try:
        measure.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"{name} left the GPU unusable; measure without it ({error})") from error


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, Unsupported):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first = str(error).strip().partition("\n")[0]
    return f"fails: {type(error).__name__}: {first[:160]}"


def _rotated(problem: Problem | LogitsProblem, device: torch.device) -> list[Any]:
    """Copies of inputs that the GPU's cache would hold, so that it holds them no more."""
    if device.type != "cuda" or isinstance(problem, LogitsProblem):
        return [problem]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = 1 + 2 * cache // problem.input_bytes
    return [problem] + [problem.copy() for _ in range(min(wanted, COPIES) - 1)]


def _step(case: Case, call: Callable[[Any], Any], problems: list[Any]) -> measure.Step:
    """A call of the round's problem: with gradients for the loss, without graph for the others."""
    if case.job != "loss":

        @torch.no_grad()
        def forward(index: int) -> Any:
            return call(problems[index % len(problems)])

        return forward

    def step(index: int) -> tuple[Outcome, tuple[Tensor, ...]]:
        problem: Problem = problems[index % len(problems)]
        out: Outcome = call(problem)
        loss = out.loss
        if loss is None:
            if problem.quantile < 1 and out.entropies is None:
                raise Unsupported("gives no entropy")
            assert out.logps is not None
            loss = policy_loss(problem, out.logps, out.entropies)
        return out, torch.autograd.grad(loss, problem.leaves)

    return step


def _mm_step(group: Group, plan: Plan) -> measure.Step:
    """The unit: what making the logits costs before anything is done with them."""
    problem = group.problem
    if isinstance(problem, LogitsProblem):
        problem = random_problem(group.shape, plan.dtype, plan.device, SEED)
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()

    def step(_: int) -> None:
        for _ in range(PRODUCTS):
            torch.mm(hidden, weight.T)

    return step


def _expected(group: Group) -> Truth | tuple[Tensor, Tensor] | None:
    if not group.case.errors:
        return None
    if isinstance(group.problem, LogitsProblem):
        return true_ratio_kl(group.problem)
    return truth(group.problem, gradients=group.case.job == "loss")


def _note_errors(row: Row, group: Group, found: Any, expected: Any) -> None:
    """Errors of a first call, and the size of its gradients, into the row."""
    problem, exact = group.problem, CONTENDERS[row.contender].exact
    if isinstance(problem, LogitsProblem):
        row.logp_error = largest_error(found[0], expected[0], problem.mask)
        return
    out, gradients = found if group.case.job == "loss" else (found, ())
    row.gradient_bytes = sum(gradient.nbytes for gradient in gradients)
    if expected is None:
        return
    if out.logps is not None:
        row.logp_error = largest_error(out.logps.detach(), expected.logps, problem.mask)
    if out.logps is None and not exact:
        return  # another loss, whose gradients are others
    for name, gradient in zip(("hidden", "weight"), gradients, strict=False):
        setattr(row, f"{name}_error", relative_error(gradient, getattr(expected, name)))


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Progress bar, closing tables and the plot."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .task import Problem
from .training import Score, StepResult

MEBIBYTE = 2**20


def progress_bar(console: Console) -> Progress:
    """A bar with a free text column, task field `note`."""
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def print_replies(
    console: Console, problems: Sequence[Problem], before: Score, after: Score
) -> None:
    """A few held-out problems with a reply from before and from after training."""
    table = Table("held-out problem", "reply before", "reply after", title="Sampled replies")
    rows = list(zip(problems, before.replies, after.replies, strict=True))
    for problem, old, new in rows[:: max(1, len(rows) // 4)][:4]:
        table.add_row(f"{problem.a} + {problem.b}", repr(old), repr(new))
    console.print(table, markup=False)


def print_summary(
    console: Console,
    history: Sequence[StepResult],
    before: Score,
    after: Score,
    loss_name: str,
) -> None:
    """The closing table."""
    table = Table("", "at first", "at last", title=f"GRPO with the {loss_name} loss")
    rows = {
        "held-out reward": (before.reward, after.reward),
        "held-out accuracy": (before.accuracy, after.accuracy),
        "reward of a step's samples": (history[0].reward, history[-1].reward),
        "KL to the reference": (history[0].kl, history[-1].kl),
        "entropy (nats)": (history[0].entropy, history[-1].entropy),
        "clip fraction": (history[0].clip_fraction, history[-1].clip_fraction),
    }
    for name, (first, last) in rows.items():
        table.add_row(name, f"{first:.3f}", f"{last:.3f}")
    console.print(table)


def print_peak(console: Console, peak_bytes: int, logits_bytes: int) -> None:
    """Peak memory of the loss, beside the size of the logits for scale."""
    console.print(
        f"peak memory of the loss: {peak_bytes / MEBIBYTE:.0f} MiB beyond its gradients, forward "
        f"and backward; one copy of the logits would be {logits_bytes / MEBIBYTE:.0f} MiB"
    )


def print_comparison(
    console: Console,
    recorded: Sequence[Sequence[float]],
    replayed: Sequence[Sequence[float]],
    peaks: tuple[int, int],
) -> None:
    """Losses of the fused run beside those of the full-logits run, as far as both go."""
    table = Table(
        "step",
        "update",
        "fused",
        "full logits",
        "difference",
        title="The same rollouts, two losses",
    )
    for step, (fused, full) in enumerate(zip(recorded, replayed, strict=False), start=1):
        for update, (x, y) in enumerate(zip(fused, full, strict=True), start=1):
            table.add_row(f"{step}", f"{update}", f"{x:.7f}", f"{y:.7f}", f"{abs(x - y):.1e}")
    console.print(table)
    fused_peak, full_peak = peaks
    console.print(
        f"peak memory of the loss: fused {fused_peak / MEBIBYTE:.0f} MiB, "
        f"full logits, written long-hand, {full_peak / MEBIBYTE:.0f} MiB "
        f"({full_peak / fused_peak:.1f} times as much), beyond the gradients"
    )


def plot(
    path: Path, history: Sequence[StepResult], scores: dict[int, Score], loss_name: str
) -> None:
    """Reward, held-out accuracy, KL, entropy and clip fraction over the steps, as a PNG.

    Args:
        scores: held-out score by the number of steps done before it.
    """
    steps = range(1, len(history) + 1)
    figure = Figure(figsize=(17, 3.4), layout="constrained")
    axes = figure.subplots(1, 5)
    curves = {
        "reward": (steps, [step.reward for step in history]),
        "held-out accuracy": (list(scores), [score.accuracy for score in scores.values()]),
        "KL, after a step's updates": (steps, [step.kl for step in history]),
        "entropy (nats)": (steps, [step.entropy for step in history]),
        "clip fraction": (steps, [step.clip_fraction for step in history]),
    }
    for axis, (title, (x, y)) in zip(axes, curves.items(), strict=True):
        axis.plot(x, y, marker=".")
        axis.set(title=title, xlabel="step", xlim=(0, None), ylim=(0, None))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.set_ylim(0, 1.02)
    axes[0].plot(list(scores), [score.reward for score in scores.values()], marker=".")
    axes[0].legend(["samples", "held out"], loc="lower right")
    figure.suptitle(f"GRPO on one-digit sums, SmolLM2-135M-Instruct, {loss_name} loss")
    figure.savefig(path, dpi=110)

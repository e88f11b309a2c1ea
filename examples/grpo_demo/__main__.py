"""Fine-tune SmolLM2-135M-Instruct with GRPO on one-digit sums."""

import argparse
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import perf_counter

# Read when torch and tqdm are imported. Threads that wait for each other sleep: spinning stalls the
# run for minutes where other processes want the same cores. No log lines of the profiler, and no
# progress bars but our own.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from rich.console import Console
from torch import nn

from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig

from . import report
from .memory import loss_peak_bytes
from .policy import FullLogitsLoss, Policy, load_model
from .rollout import Recording
from .sampling import sampled_rollouts
from .task import split
from .training import Score, StepResult, evaluate, train

# The default budget of the loss's temporaries is meant for real batches; it would hold every logit
# of this one.
CHUNK_BYTES = 32 * report.MEBIBYTE
COMPARED_STEPS = 5
SMOKE_STEPS = 3
# What decides the losses beside the rollouts: a recording is replayed under the same. The seed is
# there so that nobody takes one run's recording for another's.
REPLAYED_OPTIONS = ("seed", "lr", "beta", "inner_steps")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo_demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--loss",
        choices=("fused", "full-logits"),
        default="fused",
        help="full-logits trains on the rollouts that the last fused run recorded under --out, "
        "and compares the losses",
    )
    add("--steps", type=int, default=18, help=f"rollouts; up to {SMOKE_STEPS}: a smaller smoke run")
    add("--seed", type=int, default=0, help="of the choice of problems and of the sampling")
    add("--out", type=Path, default=Path("out/demo"), help="folder of the plot and the recording")
    add("--lr", type=float, default=3e-5, help="AdamW's learning rate")
    add("--beta", type=float, default=0.04, help="weight of the KL to the reference")
    add("--questions", type=int, default=4, help="problems in a rollout")
    add("--group-size", type=int, default=8, help="completions of a problem, at least 2")
    add("--length", type=int, default=10, help="most tokens of a completion, at least 2")
    add("--inner-steps", type=int, default=2, help="optimizer steps on a rollout")
    options = parser.parse_args()
    at_least = {"steps": 1, "questions": 1, "inner_steps": 1, "group_size": 2, "length": 2}
    for name, least in at_least.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.steps <= SMOKE_STEPS:
        options.questions = min(options.questions, 2)
    return options


def choose_loss(name: str, beta: float) -> nn.Module:
    """DAPO's loss with a KL to the reference, fused or on full logits."""
    config = RatioKLConfig(loss_type="dapo", beta=beta, epsilon_low=0.2, epsilon_high=0.28)
    if name == "full-logits":
        return FullLogitsLoss(config)
    return FusedLinearRatioKLLoss(config, chunk_bytes=CHUNK_BYTES)


def run_steps(
    results: Iterable[StepResult], steps: int, score: Callable[[], Score], console: Console
) -> tuple[list[StepResult], dict[int, Score]]:
    """Train under a progress bar, scored on the held-out problems now and then.

    Returns:
        The steps' results, and the scores by the number of steps done before each; the first is
        from before training and the last from after it.
    """
    history: list[StepResult] = []
    scores: dict[int, Score] = {}
    every = max(2, steps // 6)

    def note_score() -> None:
        done = len(history)
        scores[done] = now = score()
        console.print(
            f"after {done:2d} steps: held-out reward {now.reward:.2f}, accuracy {now.accuracy:.2f}"
        )

    with report.progress_bar(console) as bar:
        task = bar.add_task("", total=steps, note="")
        note_score()
        for result in results:
            history.append(result)
            note = f"reward {result.reward:.2f}  KL {result.kl:.2f}  entropy {result.entropy:.2f}"
            bar.update(task, advance=1, note=note)
            if len(history) == steps or len(history) % every == 0:
                note_score()
    return history, scores


def main() -> None:
    """Load the model, train it, and report."""
    start = perf_counter()
    options = parse_options()
    console = Console(highlight=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    recording_path = options.out / "rollouts.pt"
    replayed = {name: getattr(options, name) for name in REPLAYED_OPTIONS}
    recording = None
    if options.loss == "full-logits":
        recording = Recording.load(recording_path, replayed, device)
        options.steps = min(options.steps, len(recording.rollouts))

    console.print(f"Loading SmolLM2-135M-Instruct on {device.type}, about 20 s ...")
    tokenizer, model = load_model(device)
    policy = Policy(model, choose_loss(options.loss, options.beta))
    problems, held_out = split()
    held_out = held_out[:: 3 if options.steps <= SMOKE_STEPS else 1]
    if recording is None:
        rollouts = sampled_rollouts(
            policy,
            tokenizer,
            problems,
            questions=options.questions,
            group_size=options.group_size,
            length=options.length,
            seed=options.seed,
        )
    else:
        rollouts = iter(recording.rollouts)
    first = next(rollouts)
    console.print(
        f"Training on {len(problems)} sums, {len(held_out)} others are held out. A step takes "
        f"{len(first.completions)} replies to {len(first.prompts)} sums and updates the model "
        f"{options.inner_steps} times."
    )
    peak_bytes = loss_peak_bytes(policy, first)
    rollouts = islice(chain([first], rollouts), options.steps)
    results = train(policy, rollouts, lr=options.lr, inner_steps=options.inner_steps)
    score = partial(evaluate, policy, tokenizer, held_out, samples=2, length=options.length)
    history, scores = run_steps(results, options.steps, score, console)

    report.print_replies(console, held_out, scores[0], scores[options.steps])
    report.print_summary(console, history, scores[0], scores[options.steps], options.loss)
    logits_bytes = 4 * first.completions.numel() * len(policy.lm_head.weight)
    report.print_peak(console, peak_bytes, logits_bytes)
    losses = [result.losses for result in history]
    if recording is None:
        seen = [result.rollout for result in history]
        Recording(replayed, seen, losses, peak_bytes).save(recording_path)
    else:
        report.print_comparison(
            console, recording.losses[:COMPARED_STEPS], losses, (recording.peak_bytes, peak_bytes)
        )
    picture = options.out / f"{options.loss}.png"
    report.plot(picture, history, scores, options.loss)
    console.print(f"plot: {picture}; {perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()

"""A head cut over ranks against the whole head on one, and each collective of the loss.

    python -m benchmark.ranks                               2 GPUs, over NCCL
    python -m benchmark.ranks --size 4 --shape 8192x4096x151936 --out out/four
    python -m benchmark.ranks --device cpu                  small, over gloo: only to see it work

Starts its own ranks. Every call is begun by all of them together; a time is the median over rounds
of the slowest rank. Speed-ups are over the whole head on one GPU in the same rounds. "waits" adds
the gradient of hidden up after the last product, "overlapped" beside it, as the library does;
"part" does not add up. Before anything is timed, the scores and gradients are compared with those
of the whole head.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ratio_kl import linear_logprob
from ratio_kl.distributed.groups import Group, gather_over, resolve, start_sum, sum_over, wait_for
from ratio_kl.distributed.quantile import masked_quantile
from ratio_kl.distributed.shared_sum import shared_sum
from ratio_kl.ops.sharding import PartOfHidden

from .measure import synchronize
from .quantile import TABLE_BYTES
from .results import environment
from .shapes import Shape, parse

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SEQUENCES = 64
LOGP_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-2
WHOLE = "whole head, one rank"


@dataclass
class Row:
    """One call."""

    name: str
    ms: float
    bytes: int | None = None
    """Of the tensor that a rank hands to the collective."""
    speed_up: float | None = None
    share: float | None = None
    """Of the time of forward and backward of the head that is cut."""


@dataclass(frozen=True)
class Head:
    """One rank's inputs."""

    hidden: Tensor
    weight: Tensor
    own: Tensor
    ids: Tensor
    grads: Tensor
    group: Group
    process_group: dist.ProcessGroup

    def call(self, kind: str, backward: bool) -> tuple[Tensor, ...]:
        """logps, and if asked for the gradients of hidden and weight."""
        options = {} if kind == WHOLE else {"tp_group": self.process_group}
        options |= {"tp_hidden_grad": "part"} if kind == "part" else {}
        weight = self.weight if kind == WHOLE else self.own
        with torch.set_grad_enabled(backward), added_up_late(kind == "waits"):
            logps = linear_logprob(
                self.hidden, weight, self.ids, vocab_size=self.weight.shape[0], **options
            ).logps
            if not backward:
                return (logps,)
            return logps, *torch.autograd.grad(logps, (self.hidden, weight), self.grads)


@contextmanager
def added_up_late(late: bool):
    """Leave the sum over ranks to the end of pass 2, if `late`."""

    def start(self: PartOfHidden, part: Tensor) -> None:
        """Not yet."""

    def finish(self: PartOfHidden, part: Tensor) -> Tensor:
        return wait_for(start_sum(part, self.group))

    with mock.patch.multiple(PartOfHidden, start=start, finish=finish) if late else nullcontext():
        yield


def make_head(rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Head:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    hidden = normal(shape.tokens, shape.width).to(dtype).requires_grad_()
    weight = (0.02 * normal(shape.vocabulary, shape.width)).to(dtype)
    ids = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    group, world = resolve(), dist.group.WORLD
    assert group is not None
    assert world is not None
    own = weight.tensor_split(size)[rank].clone().requires_grad_()
    return Head(hidden, weight.requires_grad_(), own, ids, normal(shape.tokens), group, world)


def check(head: Head, rank: int, size: int) -> dict[str, float]:
    """How far the head that is cut is from the whole one; SystemExit if that is too far."""
    logps, d_hidden, d_weight = head.call("overlapped", backward=True)
    wanted, whole_hidden, whole_weight = head.call(WHOLE, backward=True)
    own = whole_weight.tensor_split(size)[rank]
    found = {
        "logps": (logps - wanted).abs().max().item(),
        "d_hidden": _distance(d_hidden, whole_hidden),
        "d_weight": _distance(d_weight, own),
    }
    if found["logps"] > LOGP_LIMIT or max(found["d_hidden"], found["d_weight"]) > GRADIENT_LIMIT:
        raise SystemExit(f"rank {rank}: wrong, so nothing is timed: {found}")
    return found


def _distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def timed(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int):
    """{name: ms}: medians over interleaved rounds, of the slowest rank."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            synchronize(device)
            dist.barrier()
            synchronize(device)
            start = perf_counter()
            call()
            synchronize(device)
            if index >= 2:
                taken[name].append(1e3 * (perf_counter() - start))
    medians = torch.tensor([statistics.median(times) for times in taken.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(calls, medians.tolist(), strict=True))


def head_rows(head: Head, device: torch.device, rounds: int) -> list[Row]:
    rows = []
    for title, backward, kinds in (
        ("forward", False, (WHOLE, "cut")),
        ("forward + backward", True, (WHOLE, "overlapped", "waits", "part")),
    ):
        calls = {kind: lambda k=kind, b=backward: head.call(k, b) for kind in kinds}
        times = timed(calls, device, rounds)
        for kind, ms in times.items():
            speed_up = None if kind == WHOLE else times[WHOLE] / ms
            rows.append(Row(f"{title}, {kind}", ms, speed_up=speed_up))
    return rows


def collective_rows(head: Head, device: torch.device, rounds: int, whole_ms: float) -> list[Row]:
    """Each collective of a call by itself, at this call's sizes."""
    tokens, width = head.hidden.shape
    group = head.group
    scores = torch.zeros(4 * tokens + 1, device=device)
    gradient = torch.zeros(tokens, width, device=device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    sums = torch.zeros(SEQUENCES, device=device)
    entropies = torch.rand(tokens, device=device)
    mask = torch.ones_like(entropies, dtype=torch.bool)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "scores of the ranks (tp_group), all-gather": (lambda: gather_over(scores, group), 4),
        "gradient of hidden (tp_group), all-reduce": (
            lambda: wait_for(start_sum(gradient, group)),
            4,
        ),
        "sums of 64 sequences (cp_group), all-gather": (lambda: shared_sum(sums, group), 4),
        "tokens and bad values, all-reduce": (lambda: sum_over(counts, group), 8),
    }
    sizes = [scores.numel(), gradient.numel(), sums.numel(), counts.numel()]
    times = timed({name: call for name, (call, _) in calls.items()}, device, rounds)
    rows = [
        Row(name, ms, bytes=elements * calls[name][1], share=ms / whole_ms)
        for (name, ms), elements in zip(times.items(), sizes, strict=True)
    ]
    quantile = {
        "entropy quantile, histograms": lambda: masked_quantile(
            entropies, mask, 0.8, group, "histogram"
        )
    }
    for name, ms in timed(quantile, device, rounds).items():
        rows.append(Row(name, ms, bytes=TABLE_BYTES, share=ms / whole_ms))
    return rows


def run_rank(rank: int, size: int, store: str, options: argparse.Namespace, results: str) -> None:
    """Everything on one rank; rank 0 saves the rows and the distances."""
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
        device_id=device if on_gpu else None,
    )
    head = make_head(rank, size, options.shape, DTYPES[options.dtype], device)
    distances = check(head, rank, size)
    rows = head_rows(head, device, options.rounds)
    (cut,) = (row.ms for row in rows if row.name == "forward + backward, overlapped")
    rows += collective_rows(head, device, options.rounds, cut)
    if rank == 0:
        Path(results).write_text(json.dumps([[asdict(row) for row in rows], distances]))
    dist.destroy_process_group()


HEADER = ("call", "ms", "over one rank", "bytes", "of the loss's time")


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.ms:.4g}",
        "" if row.speed_up is None else f"{row.speed_up:.2f}x",
        "" if row.bytes is None else f"{row.bytes:,}",
        "" if row.share is None else f"{row.share:.1%}",
    )


def report(rows: list[Row], about: dict[str, str], out: Path, console: Console) -> None:
    """A table in the terminal, ranks.json and ranks.md in `out`."""
    table = Table(*HEADER, title=about["problem"], title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*cells(row), style="bold" if "overlapped" in row.name else None)
    console.print(table)
    for name, value in about.items():
        console.print(f"{name}: {value}", style="dim", markup=False, highlight=False)
    lines = [f"- {name}: {value}" for name, value in about.items()]
    body = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    lines = ["# Over ranks", "", *lines, "", *("| " + " | ".join(line) + " |" for line in body)]
    out.mkdir(parents=True, exist_ok=True)
    saved = {"environment": about, "rows": [asdict(row) for row in rows]}
    (out / "ranks.json").write_text(json.dumps(saved, indent=1) + "\n", "utf-8")
    (out / "ranks.md").write_text("\n".join(lines) + "\n", "utf-8")
    console.print(f"written: {out / 'ranks.json'}, {out / 'ranks.md'}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    enough = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--size", type=int, default=2, help="ranks (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if enough else "cpu")
    add("--shape", type=parse, metavar="NxHxV", help="default: 8192x4096x131072; small on a CPU")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on GPUs, float32 on a CPU")
    add("--rounds", type=int, default=15, help="calls of each kind (default: %(default)s)")
    add("--out", type=Path, default=Path("out/benchmark"))
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.shape = options.shape or (
        Shape(8192, 4096, 131_072) if on_gpu else Shape(128, 64, 4096)
    )
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results"
        given = (options.size, f"{directory}/store", options, str(results))
        processes.spawn(run_rank, given, nprocs=options.size, join=True)
        found, distances = json.loads(results.read_text())
    command = shlex.join(["python", "-m", "benchmark.ranks", *(arguments or sys.argv[1:])])
    about = environment(torch.device(options.device), command)
    about["problem"] = f"{options.size} ranks, {options.shape}, {options.dtype}"
    about["distance from the whole head"] = ", ".join(f"{k} {v:.1e}" for k, v in distances.items())
    console = Console(width=None if Console().is_terminal else 160)
    report([Row(**row) for row in found], about, options.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

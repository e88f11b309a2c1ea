"""Peak resident memory of forward + backward on the CPU, above inputs and gradients.

    python -m benchmark --memory               the table, a few minutes on two cores
    python -m benchmark --memory --write FILE  the table as Markdown, too

Every figure is measured in a fresh process: its high-water mark is reset once the inputs exist and
a small call has warmed up what a first call allocates, and read after backward. Linux only.
"""

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ratio_kl import FusedLinearRatioKLLoss

MIB = 1024 * 1024


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    tokens: int = 4096
    vocabulary: int = 151_936
    width: int = 256
    sequences: int = 32
    chunk_mib: int = 128
    loss: str = "ours"
    half_inactive: bool = False
    weight_frozen: bool = False
    grad: bool = True


FIGURES = (
    Figure("ours"),
    Figure("ours, 64 MiB", chunk_mib=64),
    Figure("ours, 16 MiB", chunk_mib=16),
    Figure("one long sequence", sequences=1, chunk_mib=64),
    Figure("a quarter of the vocabulary", vocabulary=37_984, chunk_mib=64),
    Figure("a quarter of the tokens", tokens=1024, chunk_mib=64),
    Figure("half of the tokens inactive", half_inactive=True, chunk_mib=64),
    Figure("frozen weight", weight_frozen=True, chunk_mib=64),
    Figure("no_grad", grad=False, chunk_mib=64),
    Figure("eager full logits", loss="full logits"),
)


def status_bytes(field: str) -> int:
    """A field of this process's memory status, in bytes."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def call(figure: Figure, tokens: int, vocabulary: int) -> tuple[int, int]:
    """Run one step; returns its peak above inputs and gradients, and the gradients' size."""
    generator = torch.Generator().manual_seed(0)
    length = tokens // figure.sequences
    shape = (figure.sequences, length)
    hidden = torch.randn(*shape, figure.width, generator=generator)
    weight = torch.randn(vocabulary, figure.width, generator=generator)
    hidden.requires_grad_(figure.grad)
    weight.requires_grad_(figure.grad and not figure.weight_frozen)
    ids = torch.randint(vocabulary, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.bool)
    if figure.half_inactive:
        mask[:, ::2] = False
    advantages = torch.randn(figure.sequences, generator=generator)
    module = FusedLinearRatioKLLoss(chunk_bytes=figure.chunk_mib * MIB)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
    with torch.set_grad_enabled(figure.grad):
        if figure.loss == "ours":
            loss = module(hidden, weight, ids, mask, advantages).loss
        else:
            loss = eager_loss(hidden, weight, ids, advantages)
    if figure.grad:
        loss.backward()
    gradients = sum(
        leaf.grad.numel() * leaf.grad.element_size()
        for leaf in (hidden, weight)
        if leaf.grad is not None
    )
    return status_bytes("VmHWM") - before - gradients, gradients


def eager_loss(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """The least that full logits can do: DAPO's loss of the first step, no entropy, no KL."""
    logps = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    ratio = (logps - logps.detach()).exp()
    return -(ratio * advantages[:, None]).mean()


def measure(figure: Figure) -> int:
    """The figure's extra memory in bytes, from a fresh process."""
    command = [sys.executable, "-m", "benchmark.memory", "--figure", json.dumps(asdict(figure))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def show(rows: list[tuple[Figure, int]], command: str) -> str:
    """Print the table and return it as Markdown."""
    header = ("", "N", "V", "B", "chunk_bytes (MiB)", "extra (MiB)")
    cells = [
        (
            figure.what,
            f"{figure.tokens:,}",
            f"{figure.vocabulary:,}",
            str(figure.sequences),
            str(figure.chunk_mib) if figure.loss == "ours" else "-",
            f"{extra / MIB:,.0f}",
        )
        for figure, extra in rows
    ]
    title = (
        f"Peak resident memory above inputs and gradients, H = {FIGURES[0].width}, float32; "
        f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{command}"
    )
    table = Table(*header, title=title)
    for row in cells:
        table.add_row(*row)
    Console(width=100).print(table)
    lines = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *cells)]
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--figure", help="measure one figure, given as JSON, in this process")
    parser.add_argument("--write", type=Path, help="write the table to this Markdown file")
    arguments = parser.parse_args()
    if arguments.figure is None:
        rows = []
        for figure in track(FIGURES, "measuring, half a minute each on idle cores"):
            rows.append((figure, measure(figure)))
            print(f"{figure.what}: {rows[-1][1] / MIB:,.0f} MiB", flush=True)
        markdown = show(rows, "python -m benchmark --memory")
        if arguments.write is not None:
            arguments.write.write_text(markdown, "utf-8")
        return
    figure = Figure(**json.loads(arguments.figure))
    call(figure, tokens=figure.sequences * 4, vocabulary=512)
    extra, _ = call(figure, figure.tokens, figure.vocabulary)
    print(extra)


if __name__ == "__main__":
    main()

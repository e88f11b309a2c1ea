"""One training step of TRL's GRPOTrainer through a whole model, with each way of making the loss.

python -m benchmark.trainer_step                        Qwen3 1.7B on a GPU, a tiny model on a CPU
python -m benchmark.trainer_step --model llama-1b --tokens 8192 32768

Random weights in bfloat16 (float32 on a CPU), activation checkpointing as TRL sets it. A step is
_compute_loss and backward, no optimizer: time as the median of interleaved rounds, memory as the
peak beyond weights, gradients and inputs. Losses and gradients are compared first.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# Read when torch is imported: no log lines of the profiler.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import ratio_kl
from ratio_kl.ops.contract import DEFAULT_CHUNK_BYTES

from .measure import interleaved, peak_bytes
from .results import MIB, environment
from .trainers import CONTENDERS, HEADS, MODELS

GROUP = 4
"""Completions of a prompt, rewarded against each other."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt and of a completion; N counts the completions' tokens."""

    prompt: int
    completion: int
    tokens: tuple[int, ...]


SIZES = {"cuda": Sizes(128, 1024, (8192, 32_768)), "cpu": Sizes(4, 32, (256, 512))}
BATCHES = {
    "every token active": "every completion as long as the longest, every advantage non-zero",
    "as rollouts are": "lengths uniform up to the longest, half of the groups rewarded alike",
}


@dataclass
class Row:
    """A contender on a batch; status says why there are no figures."""

    model: str
    tokens: int
    batch: str
    contender: str
    status: str = "ok"
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    extra_bytes: int | None = None
    loss: float | None = None
    grad_norm: float | None = None


def make_batch(name: str, tokens: int, sizes: Sizes, vocabulary: int, device: torch.device) -> dict:
    """Inputs of _compute_loss as GRPOTrainer hands them on."""
    generator = torch.Generator().manual_seed(0)
    sequences = tokens // sizes.completion
    ids = torch.randint(
        3, vocabulary, (sequences, sizes.prompt + sizes.completion), generator=generator
    )
    advantages = torch.randn(sequences, generator=generator)
    lengths = torch.full((sequences, 1), sizes.completion)
    if name == "as rollouts are":
        lengths = torch.randint(1, sizes.completion + 1, (sequences, 1), generator=generator)
        lengths[0] = sizes.completion
        alike = torch.arange(sequences) // GROUP % 2 == 1
        advantages = torch.where(alike, 0, advantages)
    mask = (torch.arange(sizes.completion) < lengths).long()
    batch = {
        "prompt_ids": ids[:, : sizes.prompt],
        "prompt_mask": torch.ones(sequences, sizes.prompt, dtype=torch.long),
        "completion_ids": ids[:, sizes.prompt :],
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    return {key: value.to(device) for key, value in batch.items()}


def make_trainer(cls: type[GRPOTrainer], model: Any, sequences: int, folder: str) -> Any:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="<pad>"))
    on_gpu = torch.cuda.is_available() and model.device.type == "cuda"
    trainer = cls(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=sequences,
            num_generations=GROUP,
            bf16=False,
            use_cpu=not on_gpu,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["word"] * sequences}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


class Contender:
    """A trainer and the forward that it has given to the model that all of them share."""

    def __init__(self, name: str, model: Any, sequences: int, folder: str) -> None:
        cls, prepare = CONTENDERS[name]
        vars(model).pop("forward", None)
        self.model, self.trainer = model, make_trainer(cls, model, sequences, folder)
        if prepare is not None:
            prepare(self.trainer)
        self.forward = vars(model).pop("forward")

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        self.model.forward = self.forward
        loss = self.trainer._compute_loss(self.model, batch)
        loss.backward()
        return loss.detach()


def measure(name: str, model: Any, tokens: int, sizes: Sizes, seconds: float) -> list[Row]:
    """Rows of every batch and contender at one number of tokens."""
    device, rows = model.device, []
    with tempfile.TemporaryDirectory() as folder:
        sequences = tokens // sizes.completion
        contenders = {each: Contender(each, model, sequences, folder) for each in CONTENDERS}
        for title in BATCHES:
            batch = make_batch(title, tokens, sizes, model.config.vocab_size, device)
            found = {each: Row(name, tokens, title, each) for each in CONTENDERS}
            steps = {}
            for each, contender in contenders.items():
                if _works(contender, batch, found[each]):
                    steps[each] = lambda _, c=contender, b=batch: c.step(b)
            for each, timing in interleaved(steps, device, seconds).items():
                row = found[each]
                row.ms, row.low_ms, row.high_ms = timing.median, timing.low, timing.high
                row.extra_bytes = peak_bytes(steps[each], device)
            rows += found.values()
    return rows


def _works(contender: Contender, batch: dict[str, Tensor], row: Row) -> bool:
    """Whether a first step runs; notes its loss and gradients, which stay allocated."""
    contender.model.zero_grad(set_to_none=False)
    try:
        row.loss = contender.step(batch).item()
    except torch.cuda.OutOfMemoryError:
        row.status = "out of memory"
        torch.cuda.empty_cache()
        return False
    grads = [p.grad for p in contender.model.parameters() if p.grad is not None]
    row.grad_norm = torch.stack(torch._foreach_norm(grads)).float().norm().item()
    return True


def disagreements(rows: list[Row], tolerance: float) -> list[str]:
    """Heads whose loss or gradient norm differs from TRL's fused head by more than `tolerance`."""
    found = []
    reference = {(r.tokens, r.batch): r for r in rows if r.contender == "TRL's fused head"}
    for row in rows:
        other = reference[row.tokens, row.batch]
        if row.contender not in HEADS or row.status != "ok" or other.status != "ok":
            continue
        scale = max(abs(other.grad_norm or 0), 1e-6)
        if abs((row.grad_norm or 0) - scale) > tolerance * scale:
            found.append(f"{row.contender} at {row.tokens}, {row.batch}: {row.grad_norm} {scale}")
        if abs((row.loss or 0) - (other.loss or 0)) > tolerance:
            found.append(f"{row.contender} at {row.tokens}, {row.batch}: {row.loss} {other.loss}")
    return found


HEADER = ("N", "", "ms", "extra MiB")


def cells(row: Row) -> tuple[str, ...]:
    if row.status != "ok":
        return (f"{row.tokens:,}", f"{row.contender}: {row.status}", "", "")
    assert row.ms is not None
    assert row.extra_bytes is not None
    return (
        f"{row.tokens:,}",
        row.contender,
        f"{row.ms:.4g}",
        f"{row.extra_bytes / MIB:,.0f}",
    )


def write(rows: list[Row], about: dict[str, str], out: Path, console: Console) -> None:
    """The tables in the terminal, and both files."""
    out.mkdir(parents=True, exist_ok=True)
    data = {"environment": about, "rows": [asdict(row) for row in rows]}
    (out / "trainer_step.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    text = [f"{name}: {value}  " for name, value in about.items()]
    for batch, meaning in BATCHES.items():
        table = Table(*HEADER, title=f"{batch}: {meaning}")
        text += ["", f"**{batch}**: {meaning}", "", "| " + " | ".join(HEADER) + " |"]
        text.append("|---:|---|---:|---:|")
        for row in (row for row in rows if row.batch == batch):
            table.add_row(*cells(row))
            text.append("| " + " | ".join(cells(row)) + " |")
        console.print(table)
    (out / "trainer_step.md").write_text("\n".join(text) + "\n", "utf-8")
    console.print(f"written to {out}/trainer_step.json and .md")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmark.trainer_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--model", choices=MODELS, help="default: qwen3-1.7b on a GPU, tiny on a CPU")
    add("--tokens", nargs="+", type=int, metavar="N", help="of all completions together")
    add("--device", help="default: cuda where there is one")
    add("--out", type=Path, default=Path("out/benchmark"), help="folder (default: %(default)s)")
    add("--seconds", type=float, default=20.0, help="of rounds for each batch")
    return made


def main() -> int:
    options = parser().parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # other packages' about each other
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    sizes = SIZES[device.type]
    name = options.model or ("qwen3-1.7b" if on_gpu else "tiny")
    console = Console(width=None if Console().is_terminal else 120)
    command = shlex.join(["python", "-m", "benchmark.trainer_step", *sys.argv[1:]])
    packages = {"ratio_kl": ratio_kl.__version__}
    packages |= {each: metadata.version(each) for each in ("trl", "transformers", "accelerate")}
    about = environment(device, command) | {
        "packages": ", ".join(f"{each} {version}" for each, version in packages.items()),
        "chunk_bytes": f"{DEFAULT_CHUNK_BYTES / MIB:.0f} MiB",
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name]().to(torch.bfloat16 if on_gpu else torch.float32).train()
    # Trainer.train() turns it on by TRL's defaults.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    about["model"] = f"{name}, {model.num_parameters() / 1e6:,.0f} M parameters, {model.dtype}"
    for key, value in about.items():
        console.print(f"{key}: {value}", highlight=False)
    rows = []
    for tokens in options.tokens or sizes.tokens:
        rows += measure(name, model, tokens, sizes, options.seconds if on_gpu else 2.0)
    wrong = disagreements(rows, 5e-2 if on_gpu else 1e-4)
    if wrong:
        console.print("the heads disagree, nothing is reported:", *wrong, sep="\n")
        return 1
    write(rows, about, options.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

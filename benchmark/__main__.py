"""Time, memory and error of the loss beside its rivals.

make benchmark                               every case; small sizes where there is no GPU
make benchmark ARGS="--case dense --against trl eager"
make benchmark ARGS="--memory"               resident memory of the process, on a CPU
make benchmark ARGS="--kernels"              the Triton kernels alone, on a GPU
make benchmark ARGS="--fronts"               the host's time of a front of ratio_kl.compat
make benchmark ARGS="--quantile"             the entropy quantile over ranks
make benchmark ARGS="--ranks"                a head and sequences cut over ranks, each collective
make benchmark ARGS="--trainer_step"         a training step of TRL's GRPOTrainer
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

# Read when torch is imported: no log lines of the profiler.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from rich.console import Console

from . import report, rivals, run, shapes
from .cases import CASES
from .results import Run, environment

APART = {
    "memory": "peak resident memory on the CPU, each figure in a fresh process",
    "kernels": "the Triton kernels alone, on a GPU",
    "fronts": "what a front of ratio_kl.compat costs the host beyond the public call below it",
    "quantile": "time and bytes sent of the entropy quantile over ranks",
    "ranks": "a head that is cut over GPUs, and each collective, over NCCL (gloo on a CPU)",
    "trainer_step": "a training step of TRL's GRPOTrainer through a whole model, with each head",
}
"""Benchmarks of their own, in modules of these names; other arguments go to them."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RIVALS = [name for name in rivals.CONTENDERS if name != rivals.OURS]


def shape(text: str) -> shapes.Shape:
    try:
        return shapes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    for name, summary in APART.items():
        add(f"--{name}", action="store_true", help=f"instead: {summary}")
    add("--case", nargs="+", choices=CASES, metavar="NAME", help=f"of {', '.join(CASES)}")
    add("--against", nargs="*", choices=RIVALS, metavar="NAME", help=f"of {', '.join(RIVALS)}")
    add("--shape", nargs="+", type=shape, metavar="NxHxV", help="default: the case's own")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--device", help="default: cuda where there is one")
    add("--inputs", type=Path, help="measure on this file, too (python -m benchmark.inputs FILE)")
    add("--out", type=Path, default=Path("out/benchmark"), help="folder (default: %(default)s)")
    add("--seconds", type=float, help="of rounds for each size (default: 3; 0.5 on a CPU)")
    add("--budget", type=float, default=3600, help="seconds after which nothing new is begun")
    return made


def run_apart(names: list[str], others: list[str]) -> int:
    """Each in a process of its own, so that none sees another's memory."""
    codes = []
    for name in names:
        print(f"{name}: {APART[name]}", flush=True)
        command = [sys.executable, "-m", f"benchmark.{name}", *others]
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


def main() -> int:
    apart = [name for name in APART if f"--{name}" in sys.argv[1:]]
    if apart:
        others = [part for part in sys.argv[1:] if part.removeprefix("--") not in APART]
        return run_apart(apart, others)
    options = parser().parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    dtype = DTYPES[options.dtype or ("bfloat16" if on_gpu else "float32")]
    command = shlex.join(["python", "-m", "benchmark", *sys.argv[1:]])
    console = Console(width=None if Console().is_terminal else 160)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = run.Plan(
        cases=options.case or list(CASES),
        against=options.against,
        shapes=options.shape,
        dtype=dtype,
        device=device,
        out=options.out,
        inputs=options.inputs,
        seconds=options.seconds or (3.0 if on_gpu else 0.5),
        budget=options.budget,
    )
    result = Run(environment(device, command))
    all_right = run.run(plan, result, console)
    report.write(result, options.out, console)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time, memory and host time of calls.

Time: medians of interleaved rounds, each contender once a round in random order, by events on a
GPU and by the clock on a CPU. On a GPU a call is queued behind other work, as in training behind
the model's forward: what the host does before the first kernel starts costs no time there, nor
here, and the GPU's clock, which falls with its load, is the same for each.

Memory: what torch's allocator held at most above what it held before; on a CPU from the
allocator's own records, so that the process's other memory does not blur it.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from time import perf_counter, sleep

import torch
from torch.profiler import ProfilerActivity, profile

Step = Callable[[int], object]
"""One call; its argument is the number of the round, by which inputs rotate."""
ROUNDS = range(7, 31)
"""Fewest and most rounds."""
PLUG_SIZE = 8192
"""Side of the square bfloat16 product that each call is queued behind, PLUGS times."""
PLUGS = 40
"""About 55 ms on an H200. After 3 of them the first contender of a round, which came after a pause,
had a clock up to 10 % higher than one that came after another."""

BURST_PAUSE = 0.1
"""Seconds."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds."""

    median: float
    low: float
    high: float
    """First and third quartile."""
    rounds: int


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(steps: dict[str, Step], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Times of warmed-up steps, by name.

    Args:
        seconds: about how long to measure, within ROUNDS.
    """
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock
    first = {name: clock(step, 0) for name, step in steps.items()}
    fit = int(1e3 * seconds / max(sum(first.values()), 1e-3))
    rounds = min(max(fit, ROUNDS.start), ROUNDS.stop - 1)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order, dice = list(steps), random.Random(0)
    for index in range(rounds):
        dice.shuffle(order)
        for name in order:
            taken[name].append(clock(steps[name], index))
    return {name: _timing(times) for name, times in taken.items()}


def _timing(times: list[float]) -> Timing:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, low, high, len(times))


def _cpu_clock(step: Step, index: int) -> float:
    start = perf_counter()
    step(index)
    return 1e3 * (perf_counter() - start)


def _gpu_clock(device: torch.device) -> Callable[[Step, int], float]:
    plug = torch.randn(PLUG_SIZE, PLUG_SIZE, device=device, dtype=torch.bfloat16)

    def clock(step: Step, index: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        for _ in range(PLUGS):
            torch.mm(plug, plug)
        start.record()
        step(index)
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end)

    return clock


def host_time(step: Step, device: torch.device, bursts: int = 20, calls: int = 20) -> float:
    """Microseconds until a call returns on an idle device; its kernels may still run.

    The median of the fastest of bursts over some two seconds: what else a shared host has to do
    doubles a call's time for a second or so, and never shortens it.
    """
    medians = []
    for _ in range(bursts):
        times = []
        for index in range(calls):
            synchronize(device)
            times.append(1e3 * _cpu_clock(step, index))
        medians.append(statistics.median(times))
        sleep(BURST_PAUSE)
    return min(medians)


def peak_bytes(step: Step, device: torch.device) -> int:
    """Most bytes that the allocator held during a call, above those that it held before."""
    if device.type != "cuda":
        return _peak_on_cpu(step)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step(0)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(step: Step) -> int:
    """Largest running sum of what the CPU allocator handed out and took back, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(0)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event["ts"]):
        held += change["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block once it has run this long (between Python steps)."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal(SIGALRM, stop)
    setitimer(ITIMER_REAL, seconds)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)

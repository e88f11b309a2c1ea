"""Batch-global quantile: bytes sent and time of its two routes.

    python -m benchmark.quantile                  10^3 to 10^7 tokens on 2 and 4 gloo ranks
    python -m benchmark.quantile --largest 8      up to 10^8 (about 6 GB a rank)

The first tables are measured: real processes on this machine's CPU, every token active, cut
evenly; a time is the median over calls of the slowest rank. The last table is calculated, for
rings, whose traffic is the least that either collective can do: a rank sends (W - 1) times its
own share to gather, 2 (W - 1) / W times the table to add up.

The switch point is the number of tokens, over all ranks, at which the two times cross, by linear
interpolation between the measured sizes on log-log axes.
"""

import argparse
import math
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ratio_kl.distributed.groups import Group, resolve
from ratio_kl.distributed.quantile import GATHER_TOKENS, ROUTES, masked_quantile

QUANTILE = 1 - 0.2
SECONDS_A_SIZE = 1.0
TABLE_BYTES = 8 * (2048 + 2048 + 1024) + 4 * 2
"""Three tables of int64 counts for the 11 + 11 + 10 bits of a float32, then two int32 keys."""


def gather_bytes(ranks: int, tokens_a_rank: float) -> float:
    """Sent by one rank: its count, then its float32 values, to each other rank."""
    return (ranks - 1) * (8 + 4 * tokens_a_rank)


def histogram_bytes(ranks: int) -> float:
    """Sent by one rank, whatever the tokens."""
    return 2 * (ranks - 1) / ranks * TABLE_BYTES


def loopback_bytes() -> int:
    """Bytes that this machine has sent to itself; 0 where that is not counted."""
    counters = Path("/proc/net/dev")
    if not counters.exists():
        return 0
    for line in counters.read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    return 0


def sizes(largest: int) -> list[int]:
    """1, 2, 5 of each decade where the routes cross, the decades alone past it."""
    fine = [digit * 10**power for power in (3, 4, 5) for digit in (1, 2, 5)]
    return fine + [10**power for power in range(6, largest + 1)]


def measure(values: torch.Tensor, group: Group, route: str) -> tuple[float, float]:
    """Seconds of a call (median), and bytes that a rank sends in it (mean)."""
    mask = torch.ones_like(values, dtype=torch.bool)
    masked_quantile(values, mask, QUANTILE, group, route)
    seconds: list[float] = []
    sent = 0
    calls = 2
    while len(seconds) < calls:
        dist.barrier()
        before, start = loopback_bytes(), time.perf_counter()
        masked_quantile(values, mask, QUANTILE, group, route)
        seconds.append(time.perf_counter() - start)
        dist.barrier()
        sent += loopback_bytes() - before
        # All ranks agree on the number of calls: rank 0 says how many fit.
        if len(seconds) == 2:
            fit = torch.tensor(min(max(int(SECONDS_A_SIZE / max(seconds)), 3), 30))
            dist.broadcast(fit, 0)
            calls = int(fit)
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), sent / len(seconds) / group.size


def run_rank(rank: int, ranks: int, store: str, largest: int, results: str) -> None:
    """All sizes on one rank; rank 0 saves [(tokens, {route: (seconds, bytes)})]."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    group = resolve()
    assert group is not None
    rows = []
    for tokens in sizes(largest):
        generator = torch.Generator().manual_seed(rank)
        values = torch.empty(tokens // ranks).exponential_(generator=generator)
        rows.append((tokens, {route: measure(values, group, route) for route in ROUTES}))
    if rank == 0:
        torch.save(rows, results)
    dist.destroy_process_group()


def crossing(rows: list) -> float | None:
    """Tokens from which on the histogram route is the faster one; None if it never is."""
    previous = None
    for tokens, found in reversed(rows):
        lead = math.log(found["gather"][0] / found["histogram"][0])
        if lead < 0:
            if previous is None:
                return None
            next_tokens, next_lead = previous
            share = lead / (lead - next_lead)
            return tokens * (next_tokens / tokens) ** share
        previous = tokens, lead
    return rows[0][0]


def print_measured(ranks: int, rows: list) -> None:
    print(f"\n{ranks} gloo ranks, one thread each: measured")
    print(f"{'tokens':>11} {'gather':>24} {'histogram':>24} {'calculated':>24}")
    print(f"{'in all':>11} {'ms':>11} {'sent/rank':>12} {'ms':>11} {'sent/rank':>12}", end="")
    print(f" {'gather':>11} {'histogram':>12}")
    for tokens, found in rows:
        print(f"{tokens:>11,}", end="")
        for route in ROUTES:
            seconds, sent = found[route]
            print(f" {1e3 * seconds:>11.2f} {sent:>12,.0f}", end="")
        print(f" {gather_bytes(ranks, tokens / ranks):>11,.0f} {histogram_bytes(ranks):>12,.0f}")


def print_calculated() -> None:
    print("\nBytes sent by a rank: calculated. Each rank also receives and sorts, to gather,")
    print("the tokens of all ranks.")
    a_rank = (1_000, 16_384, 131_072)
    print(f"{'ranks':>6}" + "".join(f" {f'gather {n:,}':>18}" for n in a_rank), end="")
    print(f" {'histogram':>12} {'equal at tokens in all':>24}")
    for ranks in (2, 4, 8, 16, 64, 256, 1024, 4096):
        equal = max((2 * TABLE_BYTES / ranks - 8) / 4 * ranks, 0)
        print(f"{ranks:>6}", end="")
        for tokens in a_rank:
            print(f" {gather_bytes(ranks, tokens):>18,.0f}", end="")
        print(f" {histogram_bytes(ranks):>12,.0f} {equal:>24,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--largest", type=int, default=7, help="10^LARGEST tokens at most")
    arguments = parser.parse_args()
    crossings = {}
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as directory:
            results = f"{directory}/results"
            store = f"{directory}/store"
            processes.spawn(
                run_rank, (ranks, store, arguments.largest, results), nprocs=ranks, join=True
            )
            rows = torch.load(results)
        print_measured(ranks, rows)
        crossings[ranks] = crossing(rows)
    print_calculated()
    print()
    for ranks, tokens in crossings.items():
        where = "never, up to here" if tokens is None else f"from {tokens:,.0f} tokens on"
        print(f"{ranks} ranks: the histogram route is the faster one {where}")
    print(f"the library switches past {GATHER_TOKENS:,} tokens")


if __name__ == "__main__":
    main()

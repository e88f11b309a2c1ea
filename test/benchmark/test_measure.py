"""Clocks and memory meters on calls whose cost is known."""

import time

import pytest
import torch

from benchmark import measure

CPU = torch.device("cpu")


def test_peak_memory_is_counted_to_the_byte():
    """Two tensors held together, then one more after they are gone."""

    def step(_):
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(500, dtype=torch.float64)
        del a, b
        return torch.empty(1500, dtype=torch.uint8)

    # The allocator hands out exactly what was asked for on a CPU.
    assert measure.peak_bytes(step, CPU) == 4000 + 4000


def test_rounds_are_interleaved_and_medians_hold():
    order = []

    def sleeper(name, seconds):
        def step(index):
            order.append((name, index))
            time.sleep(seconds)

        return step

    steps = {"fast": sleeper("fast", 0.001), "slow": sleeper("slow", 0.02)}
    times = measure.interleaved(steps, CPU, seconds=0.1)
    assert times["fast"].rounds == times["slow"].rounds == measure.ROUNDS.start
    rounds = [sorted(order[at : at + 2]) for at in range(2, len(order), 2)]
    assert rounds == [[("fast", i), ("slow", i)] for i in range(measure.ROUNDS.start)]
    assert {order[at][0] for at in range(2, len(order), 2)} == {"fast", "slow"}
    assert times["slow"].median >= 20
    assert times["slow"].low <= times["slow"].median <= times["slow"].high
    assert times["fast"].low < times["slow"].low


def test_what_does_not_get_ready_is_stopped():
    with pytest.raises(TimeoutError, match=r"not ready after 0 s"), measure.time_limit(0.05):
        time.sleep(5)
    with measure.time_limit(0.05):
        pass
    time.sleep(0.1)  # no alarm is left behind

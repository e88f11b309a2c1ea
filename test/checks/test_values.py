"""Counts of bad values on the CPU, and the order in which late ones are reported.

What an accelerator's copy brings is played by entries of the queue here.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch

from ratio_kl.checks import values
from ratio_kl.host_copy import HostCopy


def error_of(count: int) -> ValueError:
    return ValueError(f"{count} bad")


@pytest.mark.parametrize("at_once", [False, True])
def test_on_the_cpu_a_count_is_looked_at_now(at_once: bool) -> None:
    values.check_counts(torch.tensor(0), error_of, "eager" if at_once else "later")
    with pytest.raises(ValueError, match="^3 bad$"):
        values.check_counts(torch.tensor(3), error_of, "eager" if at_once else "later")


class Copy:
    """A copy to the host that arrives when it is waited for."""

    def __init__(self, arrived: bool) -> None:
        self.arrived = arrived

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.arrived = True


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> deque:
    queue: deque = deque(maxlen=64)
    monkeypatch.setattr(values, "_pending", queue)
    return queue


def add(pending: deque, count: int, *, arrived: bool) -> None:
    pending.append((HostCopy(torch.tensor([count]), Copy(arrived)), error_of))


def test_nothing_pending_is_no_error(pending: deque) -> None:
    for wait in (False, True):
        values.raise_pending(wait=wait)
    add(pending, 0, arrived=True)
    values.raise_pending(wait=False)
    assert not pending


def test_what_has_not_arrived_is_not_waited_for(pending: deque) -> None:
    add(pending, 0, arrived=True)
    add(pending, 2, arrived=False)
    add(pending, 5, arrived=True)  # behind one that has not: copies arrive in order
    values.raise_pending(wait=False)
    assert len(pending) == 2
    with pytest.raises(ValueError, match="^2 bad$"):
        values.raise_pending(wait=True)
    with pytest.raises(ValueError, match="^5 bad$"):
        values.raise_pending(wait=False)
    assert not pending


def test_an_error_is_raised_once(pending: deque) -> None:
    add(pending, 2, arrived=True)
    with pytest.raises(ValueError, match="^2 bad$"):
        values.raise_pending(wait=False)
    values.raise_pending(wait=True)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_mark_is_set_where_counts_are_on_their_way(
    pending: deque, monkeypatch, capturing
) -> None:
    gpu, marks = torch.device("cuda", 0), []

    class Event:
        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:0"  # which need not be the current device
            marks.append("set")

        def synchronize(self) -> None:
            marks.append("reached")
            for counts, _ in pending:
                counts.wait()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    values.raise_sent_before(values.sent_before_now(gpu))
    add(pending, 4, arrived=True)
    assert values.sent_before_now(gpu) is None
    add(pending, 2, arrived=False)
    assert values.sent_before_now(torch.device("cpu")) is None
    pending.popleft()
    add(pending, 0, arrived=True)  # of another GPU, which is not behind this one
    mark = values.sent_before_now(gpu)
    assert marks == ([] if capturing else ["set"])
    if not capturing:
        with pytest.raises(ValueError, match="^2 bad$"):
            values.raise_sent_before(mark)
        assert marks == ["set", "reached"]


def test_no_mark_for_counts_that_another_thread_takes_meanwhile(pending, monkeypatch) -> None:
    add(pending, 0, arrived=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", pending.clear)
    assert values.sent_before_now(torch.device("cuda", 0)) is None


class SlowCopy(Copy):
    """One that other threads get to run beside, as they do while the host waits for a device."""

    def synchronize(self) -> None:
        sleep(0.1)
        super().synchronize()


def test_threads_do_not_take_each_others_counts(pending: deque) -> None:
    """autograd runs the backwards of two devices in two threads, and both look."""
    for count in (0, 3):
        pending.append((HostCopy(torch.tensor([count]), SlowCopy(False)), error_of))
    with ThreadPoolExecutor(2) as threads:
        looks = [threads.submit(values.raise_pending, wait=True) for _ in range(2)]
    errors = [error for look in looks if (error := look.exception()) is not None]
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "3 bad")]
    assert not pending

"""Counts of bad values on the CPU, and the order in which late ones are reported.

What an accelerator's copy brings is played by entries of the queue here.
"""

import os
import subprocess
import sys
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
    """Those of the first GPU."""
    queue: deque = deque(maxlen=64)
    monkeypatch.setattr(values, "_pending", {0: queue})
    return queue


def add(pending: deque, count: int, *, arrived: bool) -> None:
    pending.append((HostCopy(torch.tensor([count]), Copy(arrived)), error_of))


@pytest.fixture
def pending_of_another_gpu(pending: deque) -> deque:
    return values._pending.setdefault(1, deque(maxlen=64))


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


def test_a_gpu_that_is_behind_holds_up_no_other_ones_error(
    pending: deque, pending_of_another_gpu: deque
) -> None:
    add(pending, 0, arrived=False)
    add(pending_of_another_gpu, 2, arrived=True)
    with pytest.raises(ValueError, match="^2 bad$"):
        values.raise_pending(wait=False)
    assert len(pending) == 1
    assert not pending_of_another_gpu


def test_an_error_is_raised_once(pending: deque) -> None:
    add(pending, 2, arrived=True)
    with pytest.raises(ValueError, match="^2 bad$"):
        values.raise_pending(wait=False)
    values.raise_pending(wait=True)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_mark_is_set_where_counts_are_on_their_way(
    pending: deque, pending_of_another_gpu: deque, monkeypatch, capturing
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
    add(pending_of_another_gpu, 0, arrived=False)
    assert values.sent_before_now(gpu) is None
    add(pending, 2, arrived=False)
    assert values.sent_before_now(torch.device("cpu")) is None
    pending.popleft()
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


FORK = """
import os
import signal
import torch
from ratio_kl import linear_logprob
from ratio_kl.checks import values

class OfTheParent:
    def has_arrived(self):
        raise MemoryError("pinned by the parent")

torch.set_num_threads(1)
hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(9, 4)
values._pending[0].append((OfTheParent(), None))
values._lock.acquire()  # as by a thread that looks
child = os.fork()
if child == 0:
    signal.alarm(30)
    linear_logprob(hidden, weight, torch.tensor([1, 2])).logps.sum().backward()
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_forgets_the_counts_and_the_lock_of_its_parent() -> None:
    """It would read memory that the parent's driver has pinned, or wait for ever."""
    code = f"import sys; sys.path[:0] = {[path for path in sys.path if path]}\n{FORK}"
    done = subprocess.run(
        # Python warns of a fork beside the threads that torch has started.
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

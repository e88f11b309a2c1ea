"""Ranks for the tests: real processes, over gloo on the CPU or NCCL on GPUs, started once."""

import os
import pickle
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

RANK_FILE = Path(__file__).with_name("rank.py")
MOST_RANKS = 4
RUN_SECONDS = 55
STOP_SECONDS = 10
"""SIGTERM ends a rank at once; where coverage is measured, the rank writes its data first."""


class Ranks:
    """The first `size` of a few processes, joined in a default process group."""

    def __init__(self, directory, most=MOST_RANKS, seconds=RUN_SECONDS, backend="gloo"):
        self.size = 0
        self._most, self._seconds, self._backend = most, seconds, backend
        self._directory = directory
        self._processes = []
        self._links = []
        self._groups_formed = 0

    def form(self, size):
        """Join the first `size` processes, starting them where none run."""
        if not self._processes:
            self._start()
        if size != self.size:
            self.size = size
            self._groups_formed += 1
            store = self._directory / f"store{self._groups_formed}"
            self._run(RANK_FILE, "form", str(store), self._backend)
        return self

    def run(self, check, *arguments):
        """check(rank, size, *arguments) on every rank at once; the list of what they return.

        `check` is a function at the top of its module. An error on any rank, or silence for
        the time limit, ends every process and fails the test; the next one starts new processes.
        """
        return self._run(sys.modules[check.__module__].__file__, check.__name__, *arguments)

    def stop(self):
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for link in self._links:
            link.close()
        self._processes, self._links, self.size = [], [], 0

    def _start(self):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in range(self._most):
            ours, theirs = Pipe()
            command = [sys.executable, str(RANK_FILE), str(rank), str(theirs.fileno())]
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
            theirs.close()
            self._processes.append(process)
            self._links.append(ours)

    def _run(self, file, name, *arguments):
        size = self.size
        for rank, link in enumerate(self._links[:size]):
            link.send_bytes(pickle.dumps((str(file), name, (rank, size, *arguments))))
        deadline = time.monotonic() + self._seconds
        values = []
        for rank, link in enumerate(self._links[:size]):
            succeeded, value = self._answer(link, deadline)
            if not succeeded:
                self.stop()
                pytest.fail(f"{name}, rank {rank} of {size}: {value}", pytrace=False)
            values.append(value)
        return values

    def _answer(self, link, deadline):
        if not link.poll(max(deadline - time.monotonic(), 0)):
            return False, f"no answer within {self._seconds} s"
        try:
            return pickle.loads(link.recv_bytes())
        except EOFError:
            return False, "the process died"


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


@pytest.fixture(params=[2, 3, 4], ids=lambda size: f"{size} ranks")
def ranks(request, processes):
    """`Ranks` of each size; `@pytest.mark.parametrize("ranks", [2], indirect=True)` picks."""
    return processes.form(request.param)


@pytest.fixture(scope="session")
def gpus(tmp_path_factory):
    """`Ranks` of two GPUs. Kernels are compiled on the way, hence the longer limit."""
    started = Ranks(tmp_path_factory.mktemp("gpus"), most=2, seconds=280, backend="nccl")
    yield started.form(2)
    started.stop()

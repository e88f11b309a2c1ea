"""Does the suite see small faults? Plants each one of mutants.py in a copy and runs its tests.

    make mutation                       every fault, about an hour on one core
    make mutation ARGS=kernels/rows.py  those of files whose names start so

A fault that no test saw is listed at the end, and the exit status is 1. Each runs in a fork of a
process that has already imported what takes longest.
"""

import io
import os
import shutil
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import mutants

ROOT = Path(__file__).parent.parent


def tests_of(file: str) -> tuple[str, ...]:
    """The tests that must see a fault of this file."""
    folder = file.split("/")[0]
    found = mutants.TESTS.get(file) or mutants.TESTS[folder]
    return tuple(f"test/{name}" for name in found)


def is_caught(mutant: mutants.Mutant, tree: Path) -> bool:
    """Whether a test of the mutant's file fails while the fault stands in `tree`."""
    path = tree / "src" / "ratio_kl" / mutant.file
    sound = path.read_text(encoding="utf-8")
    if sound.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {mutant.old!r} {sound.count(mutant.old)} times")
    path.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return not passes(tree, tests_of(mutant.file))
    finally:
        path.write_text(sound, encoding="utf-8")


def passes(tree: Path, tests: tuple[str, ...]) -> bool:
    """Whether these tests pass on the tree, in a process of their own."""
    child = os.fork()
    if child == 0:
        os._exit(_run(tree, tests))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _run(tree: Path, tests: tuple[str, ...]) -> int:
    import pytest

    os.chdir(tree)
    # A fault that reads wild memory ends in a crash, whose stack says nothing.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Where a test of ranks waits for a rank that failed, the limit ends it.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--timeout=120"]
    with redirect_stdout(io.StringIO()):
        return int(pytest.main([*options, *tests]))


def main() -> int:
    """Plant the faults of the files named on the command line, or all."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.dont_write_bytecode = True
    import torch
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    chosen = tuple(sys.argv[1:]) or ("",)
    todo = [mutant for mutant in mutants.MUTANTS if mutant.file.startswith(chosen)]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("src", "test", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        for tests in {tests_of(mutant.file) for mutant in todo}:
            if not passes(tree, tests):
                raise RuntimeError(f"without any fault there is a failure in {' '.join(tests)}")
        for mutant in todo:
            started = time.monotonic()
            caught = is_caught(mutant, tree)
            seconds = time.monotonic() - started
            word = "caught" if caught else "MISSED"
            fault = f"{mutant.file}  {mutant.old!r} -> {mutant.new!r}"
            print(f"{word} {seconds:5.1f} s  {fault}", flush=True)
            if not caught:
                missed.append(mutant)
    print(f"{len(missed)} missed")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

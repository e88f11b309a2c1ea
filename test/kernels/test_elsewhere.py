"""The kernels on GPUs that are not here: they compile, within those GPUs' shared memory."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the package triton")
from triton.backends import backends

# The smallest of each kind: consumer cards by pointers and by descriptors, wide and narrow waves.
GPUS = {
    "sm_86": ("nvidia", "cuda", "86", "32", 101_376),
    "sm_120": ("nvidia", "cuda", "120", "32", 101_376),
    "gfx942": ("amd", "hip", "gfx942", "64", 65_536),
    "gfx1100": ("amd", "hip", "gfx1100", "32", 65_536),
}


@pytest.mark.slow  # 20 s each
@pytest.mark.parametrize("gpu", GPUS)
def test_a46_tiles_fit_the_shared_memory_of_other_gpus(gpu: str, tmp_path) -> None:
    """Tiles over the shared memory of consumer cards (triton#8182, torchtune#2572), and as many
    warps as a GPU does not have (Liger-Kernel#231)."""
    name, *target, limit = GPUS[gpu]
    if name not in backends:
        pytest.skip(f"needs a Triton that compiles for {name}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "kernels.compiled", *target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == (6 if name == "amd" else 8)
    for kernel, kind, size in found:
        assert 0 < int(size) <= limit, (kernel, kind, size)

"""One rank: a process that runs the functions it is told to run. Started by conftest.py.

    python rank.py RANK FILE_DESCRIPTOR

A job is (file, function name, arguments); the answer is (succeeded, value or traceback).
"""

import importlib.util
import pickle
import sys
import traceback
import warnings
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 20
"""No collective may wait longer; an honest one takes milliseconds, on a busy machine a second."""


COMPILING_SECONDS = 200
"""The same on GPUs, where a rank may compile kernels while another waits."""


def form(rank, size, store, backend):
    """Make a fresh default group of `size` ranks that meet at the file `store`."""
    if dist.is_initialized():
        dist.destroy_process_group()
    seconds, on_gpu = COLLECTIVE_SECONDS, {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        seconds, on_gpu = COMPILING_SECONDS, {"device_id": torch.device("cuda", rank)}
        # NCCL's and the compiler's own, which differ from release to release
        warnings.simplefilter("default")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        **on_gpu,
    )


@lru_cache
def _load(file):
    spec = importlib.util.spec_from_file_location(f"checks_{abs(hash(file))}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _serve(link):
    while True:
        try:
            file, name, arguments = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, getattr(_load(file), name)(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        link.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    _serve(Connection(int(sys.argv[2])))

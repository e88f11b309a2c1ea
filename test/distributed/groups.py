"""What checks on ranks share: groups, and a record of what is sent."""

import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.tensor  # before its operators are recorded

from distributed.rank import COLLECTIVE_SECONDS, COMPILING_SECONDS


def group_of(members):
    """A group whose collectives wait no longer than those of the default group."""
    seconds = COMPILING_SECONDS if dist.get_backend() == "nccl" else COLLECTIVE_SECONDS
    return dist.new_group(list(members), timeout=timedelta(seconds=seconds))


@contextmanager
def quiet_numpy():
    """Triton's interpreter lets numpy compute on unwritten memory and take log(0)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class _Recorder:
    """torch.ops._c10d_functional, but it notes what is called: within other operators, too."""

    def __init__(self, functions, sent):
        self._functions, self._sent = functions, sent

    def __getattr__(self, name):
        function = getattr(self._functions, name)

        def recorded(tensor, *arguments):
            if name != "wait_tensor":
                self._sent.append((name, tuple(tensor.shape), str(tensor.dtype)))
            return function(tensor, *arguments)

        return recorded


@contextmanager
def recorded_collectives():
    """A list that fills with (collective, shape sent, dtype); eager mode only."""
    sent, functions = [], torch.ops._c10d_functional
    torch.ops._c10d_functional = _Recorder(functions, sent)
    try:
        yield sent
    finally:
        torch.ops._c10d_functional = functions

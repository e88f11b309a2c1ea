"""Counts of bad values that are still on their way from the device to the host.

On the CPU a count is looked at once. On an accelerator that would cost a synchronisation in every
forward, so it is copied without blocking and looked at when it has arrived: in the same call's
backward, in the next call, or when the caller asks with `raise_pending(wait=True)`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle

import torch
from torch import Tensor

MakeError = Callable[[int], ValueError]

# Bounded: a caller who never looks (inference in a loop) must not collect host memory.
_REMEMBERED = 64
_pending: deque[tuple[Tensor, torch.cuda.Event, MakeError]] = deque(maxlen=_REMEMBERED)


def check_count(bad: Tensor, make_error: MakeError, *, at_once: bool) -> None:
    """Raise `make_error(count)` if the 0-d count `bad` is not zero: now, or once it is known.

    Counts of CPU tensors, and all with `at_once`, are looked at now. In a graph under capture
    nothing can be read, and nothing is raised.

    Raises:
        ValueError: this count is known and not zero, or an earlier call's has arrived and is not.
    """
    on_cuda = bad.device.type == "cuda"
    if on_cuda and torch.cuda.is_current_stream_capturing():
        return
    if at_once or not on_cuda:
        if count := int(bad):
            raise make_error(count)
        return
    raise_pending(wait=False)
    on_host, arrived = next(_mailboxes(bad.device))
    on_host.copy_(bad, non_blocking=True)
    arrived.record(torch.cuda.current_stream(bad.device))
    _pending.append((on_host, arrived, make_error))


@lru_cache
def _mailboxes(device: torch.device) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
    """Pinned host memory for one count each, and an event, taken in turn: none is made anew."""
    slots = torch.zeros(_REMEMBERED, dtype=torch.int64, pin_memory=True).unbind()
    return cycle([(slot, torch.cuda.Event()) for slot in slots])


def raise_pending(*, wait: bool) -> None:
    """Raise ValueError for the first earlier call that was given bad values.

    With `wait` the host waits for every count that is still on its way (one synchronisation);
    without it only those that have arrived are looked at.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    while _pending:
        on_host, arrived, make_error = _pending[0]
        if not wait and not arrived.query():
            return
        arrived.synchronize()
        _pending.popleft()
        if count := int(on_host):
            raise make_error(count)

"""Counts of bad values that are still on their way from the device to the host.

On the CPU a count is looked at once. On an accelerator that would cost a synchronisation in every
forward, so it is sent without blocking and looked at when it has arrived: in the same call's
backward, in the next call, or when the caller asks with `raise_pending(wait=True)`.
"""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from ..host_copy import Cell, Cells, HostCopy, Mailbox

MakeError = Callable[..., ValueError]
"""From the counts, one argument each, to the error that says what was wrong."""

Checks = Literal["later", "eager", "defer"]
"""When an operator looks at the counts of bad values it has made: "later" when they are on the host
anyway, "eager" at once, "defer" not at all, because its caller first adds them up over ranks."""

# Each call looks, so that no more are kept than a device is calls behind. That is less than this:
# a driver makes the host wait once it is so many launches ahead.
_REMEMBERED = 1024
_mailbox = Mailbox(_REMEMBERED)
_cells = Cells(_REMEMBERED)
# Of each GPU, in the order in which they arrive: one may be far behind another.
_pending: defaultdict[int, deque[tuple[HostCopy | Cell, MakeError]]] = defaultdict(
    partial(deque, maxlen=_REMEMBERED)
)
# autograd runs the backwards of several devices in threads of their own.
_lock = Lock()


def check_counts(bad: Tensor, make_error: MakeError, checks: str) -> None:
    """Raise `make_error(*counts)` if one of the counts in `bad` is not zero: now, or once known.

    Counts of CPU tensors are looked at now, unless they are deferred. In a graph under capture
    nothing can be read, and nothing is raised.

    Args:
        bad: 0-d or [k] int64, k <= 8.
        checks: one of Checks.

    Raises:
        ValueError: a count is known and not zero, here or in an earlier call.
    """
    on_cuda = bad.device.type == "cuda"
    if checks == "defer" or (on_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if checks == "eager" or not on_cuda:
        _raise_for(bad.reshape(-1).tolist(), make_error)
        return
    _remember(bad.get_device(), _mailbox.send(bad), make_error)


def cell_for_count(device: torch.device, checks: str) -> Cell | None:
    """Memory of the host for a kernel to write its one count to, and `check_cell` to be called
    then; None where check_counts is to be called with a tensor on the device instead.

    AMD GPUs may keep what a kernel writes to the host from it until the host waits.
    """
    if checks != "later" or device.type != "cuda" or torch.version.hip:
        return None
    return None if torch.cuda.is_current_stream_capturing() else _cells.take(device.index)


def check_cell(cell: Cell, make_error: MakeError) -> None:
    """check_counts for a count that a kernel writes to `cell` when it runs."""
    _remember(cell.device, cell, make_error)


def _remember(device: int, counts: HostCopy | Cell, make_error: MakeError) -> None:
    with _lock:
        _pending[device].append((counts, make_error))
    _look(wait=False)


def _raise_for(counts: Sequence[float], make_error: MakeError) -> None:
    if any(counts):
        raise make_error(*counts)


def raise_pending(*, wait: bool) -> None:
    """Raise ValueError for the first earlier call, on one of the GPUs, that was given bad values.

    With `wait` the host waits for every count that is still on its way (one synchronisation);
    without it only those that have arrived are looked at.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    _look(wait=wait)


def sent_before_now(device: torch.device) -> torch.cuda.Event | None:
    """For raise_sent_before: where counts are on their way, a mark behind all that was launched."""
    queue = _pending.get(device.index)
    if not queue or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    with _lock:
        if all(counts.has_arrived() for counts, _ in queue):
            return None
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(device))
    return mark


def raise_sent_before(mark: torch.cuda.Event | None) -> None:
    """raise_pending for the counts sent before the mark. What was launched after it may still run.

    So a backward tells of bad values before anybody uses its gradients.
    """
    if mark is not None:
        mark.synchronize()
    raise_pending(wait=False)


def _look(*, wait: bool) -> None:
    """raise_pending, where no graph is captured."""
    with _lock:
        for queue in _pending.values():
            while queue and (wait or queue[0][0].has_arrived()):
                counts, make_error = queue[0]
                numbers = counts.wait()
                queue.popleft()
                _raise_for(numbers, make_error)


def _forget() -> None:
    """In a forked child, which has no GPU: no count arrives, and a thread that is not here may
    have left the lock locked."""
    global _lock
    _pending.clear()
    _lock = Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


def bad_values_error(vocab_size: int, ids: int, temperatures: int = 0) -> ValueError:
    """The error for so many ids, or temperatures, of active tokens that are out of range."""
    if ids == 0:
        return ValueError(
            "temperature must be > 0 and finite on active tokens; "
            f"got {temperatures} value(s) that are not"
        )
    return ValueError(
        f"action_ids must lie in [0, {vocab_size}) on active tokens; "
        f"got {ids} active token(s) with an id outside that range"
    )

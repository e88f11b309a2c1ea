"""Counts of bad values that are still on their way from the device to the host.

On the CPU a count is looked at once. On an accelerator that would cost a synchronisation in every
forward, so it is copied without blocking and looked at when it has arrived: in the same call's
backward, in the next call, or when the caller asks with `raise_pending(wait=True)`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from ..host_copy import HostCopy, Mailbox

MakeError = Callable[..., ValueError]
"""From the counts, one argument each, to the error that says what was wrong."""

Checks = Literal["later", "eager", "defer"]
"""When an operator looks at the counts of bad values it has made: "later" when they are on the host
anyway, "eager" at once, "defer" not at all, because its caller first adds them up over ranks."""

# Bounded: a caller who never looks (inference in a loop) must not collect host memory.
_REMEMBERED = 64
_mailbox = Mailbox(_REMEMBERED)
_pending: deque[tuple[HostCopy, MakeError]] = deque(maxlen=_REMEMBERED)
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
    raise_pending(wait=False)
    with _lock:
        _pending.append((_mailbox.send(bad), make_error))


def _raise_for(counts: Sequence[float], make_error: MakeError) -> None:
    if any(counts):
        raise make_error(*counts)


def raise_pending(*, wait: bool) -> None:
    """Raise ValueError for the first earlier call that was given bad values.

    With `wait` the host waits for every count that is still on its way (one synchronisation);
    without it only those that have arrived are looked at.
    """
    if not _pending or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        while _pending:
            counts, make_error = _pending[0]
            if not wait and not counts.has_arrived():
                return
            numbers = counts.wait()
            _pending.popleft()
            _raise_for(numbers, make_error)


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

"""Which rows pass 2 computes, and by what it scales their gradients.

Rows whose gradients are exactly zero are left out. How many are left the device knows first: what
needs no more than that is launched before the host waits for the count.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...host_copy import HostCopy, Mailbox
from ..contract import Head, Needs, Saved
from .launch import Rows
from .lists import Grads, blank_rows, gather_rows, list_kept

FP16_TARGET = 2.0**13
"""fp16 dx is scaled to stay below this: far from overflow (65504) and from underflow (6e-8)."""

_mailbox = Mailbox(64)


class Listed(NamedTuple):
    """The rows with a gradient, their number on its way to the host."""

    rows: Tensor
    positions: Tensor
    kept: Tensor
    """Their numbers, their positions and how many there are, as kernels/rows.py."""
    grads: Grads
    """Scaled, where the compute dtype is fp16."""
    on_host: HostCopy
    """The count, and for fp16 the scale."""


def list_rows(head: Head, saved: Saved, grads: Grads) -> Listed:
    """List the rows with a gradient. The host does not wait."""
    rows, positions, count = list_kept(grads)
    numbers = count
    if head.compute_dtype == torch.float16:
        gain = _gain(head, saved, grads)
        grads = _scaled(grads, gain)
        numbers = torch.cat((count.double(), gain[None]))
    return Listed(rows, positions, count, grads, _mailbox.send(numbers))


def listed_rows(head: Head, saved: Saved, listed: Listed, copy: Tensor | None) -> Rows | None:
    """The listed rows, for which the host waits; None if there are none.

    copy: [N, H], which begins with them; None if they were not copied yet.
    """
    count, *gain = listed.on_host.wait()
    n, alpha = int(count), 1 / gain[0] if gain else 1.0
    if n == 0:
        return None
    if n == head.hidden.shape[0]:
        hidden = head.hidden.to(head.compute_dtype)
        return Rows(hidden, saved, listed.grads, alpha=alpha)
    if copy is None:
        copy = head.hidden.new_empty((n, head.hidden.shape[1]), dtype=head.compute_dtype)
        gather_rows(head.hidden, listed.rows, listed.kept, copy)
    return Rows(copy[:n], saved, listed.grads, listed.rows, listed.positions, alpha=alpha)


def all_rows(head: Head, saved: Saved, grads: Grads, needs: Needs) -> Rows:
    """All rows, their dx 0 where they have no gradient: the host reads nothing.

    Where dx is to be multiplied with them, such rows are 0 too, for 0 times a NaN is none.
    """
    hidden = blank_rows(head, grads) if needs.weight else head.hidden.to(head.compute_dtype)
    gain = _gain(head, saved, grads) if head.compute_dtype == torch.float16 else None
    unscale = None if gain is None else (1 / gain).float()
    scaled = _scaled(grads, gain)
    return Rows(hidden, saved, scaled, unscale=unscale, has_blanks=True)


def _gain(head: Head, saved: Saved, grads: Grads) -> Tensor:
    """The power of two by which fp16 dx is scaled: 0-d float64, from a bound on |dx|."""
    g, h = grads
    bound = torch.zeros_like(saved.logps) if g is None else g.abs()
    if h is not None:
        bound = bound + h.abs() * (1 + saved.entropies)
    for factor in (head.inverse_temperature, head.logit_scale):
        if factor is not None:
            bound = bound * factor.abs()
    largest = torch.where(bound.isfinite(), bound, 0).amax().double().clamp(1e-30)
    return torch.exp2(torch.floor(torch.log2(FP16_TARGET / largest)))


def _scaled(grads: Grads, gain: Tensor | None) -> Grads:
    if gain is None:
        return grads
    g, h = (None if grad is None else (grad * gain).float() for grad in grads)
    return g, h

"""A few numbers on their way from the device to the host, which goes on meanwhile."""

from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """Numbers that were sent. Valid until their mailbox has come round."""

    numbers: Tensor
    """[k], on the host."""
    arrived: torch.cuda.Event | None
    """None: they are here."""

    def has_arrived(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait(self) -> list[int] | list[float]:
        """The numbers, once the device has reached them; what was launched later may still run."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.tolist()


class Mailbox:
    """Pinned memory and events for the last `copies` copies of a kind: none is made anew.

    A kind is a device, a dtype and how many numbers.
    """

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._slots: dict[object, Iterator[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, numbers: Tensor) -> HostCopy:
        """Copy a few numbers without waiting, behind what the device is to do."""
        numbers = numbers.reshape(-1)
        if not numbers.is_cuda:
            return HostCopy(numbers, None)
        kind = numbers.device, numbers.dtype, numbers.numel()
        slots = self._slots.get(kind)
        if slots is None:
            slots = self._slots[kind] = self._new_slots(numbers)
        on_host, arrived = next(slots)
        on_host.copy_(numbers, non_blocking=True)
        arrived.record(torch.cuda.current_stream(numbers.device))
        return HostCopy(on_host, arrived)

    def _new_slots(self, numbers: Tensor) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
        shape = self._copies, *numbers.shape
        # What is made in inference mode could not be written to outside of it, in a later call.
        with torch.inference_mode(False):
            pinned = torch.zeros(shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            return cycle([(slot, torch.cuda.Event()) for slot in pinned.unbind()])

"""A few numbers on their way from the device to the host, which goes on meanwhile.

Either a tensor is copied into pinned memory, behind what the device has to do; or a kernel itself
writes a count there, which takes no copy and no event, and the host sees that it has come.
"""

from collections import deque
from collections.abc import Iterator
from ctypes import c_int64
from functools import lru_cache
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
        arrived.record(_stream(*torch._C._cuda_getCurrentStream(numbers.get_device())))
        return HostCopy(on_host, arrived)

    def _new_slots(self, numbers: Tensor) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
        pinned = _pinned((self._copies, *numbers.shape), numbers.dtype)
        return cycle([(slot, torch.cuda.Event()) for slot in pinned.unbind()])


@lru_cache(maxsize=64)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    """torch.cuda.current_stream's result, which takes longer to make than a copy to send."""
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # What is made in inference mode could not be written to outside of it, in a later call.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)


class Cell:
    """Where a kernel writes one count, >= 0."""

    def __init__(self, place: Tensor, free: deque["Cell"]) -> None:
        """place: 0-d int64, pinned. free: where the cell goes once its count was read."""
        self.place = place
        self._number = c_int64.from_address(place.data_ptr())
        self._free = free
        self.device = -1

    def send(self, device: int) -> None:
        """Expect a count from a GPU."""
        self.device, self._number.value = device, -1

    def has_arrived(self) -> bool:
        return self._number.value >= 0

    def wait(self) -> list[int]:
        """The count, once the device has written it. It can be read once."""
        if not self.has_arrived():
            torch.cuda.synchronize(self.device)
        number = self._number.value
        self._free.append(self)
        return [number]


class Cells:
    """Cells in pinned memory. One is used again when its count was read, none is ever given back:
    a kernel that is still to run may write there."""

    def __init__(self, at_once: int) -> None:
        """at_once: how many are made when none is free."""
        self._at_once = at_once
        self._free: deque[Cell] = deque()
        self._memory: list[Tensor] = []

    def take(self, device: int) -> Cell:
        """A cell that awaits a count from that GPU."""
        try:
            cell = self._free.pop()
        except IndexError:
            # 16 bytes apart: for every other alignment Triton would compile a kernel anew.
            memory = _pinned((self._at_once, 2), torch.int64)
            self._memory.append(memory)
            cell, *others = (Cell(place, self._free) for place in memory[:, 0].unbind())
            self._free.extend(others)
        cell.send(device)
        return cell

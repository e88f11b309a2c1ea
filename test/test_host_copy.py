"""Numbers that travel to the host: on the CPU at once, from a GPU behind what it has to do."""

import pytest
import torch

from ratio_kl.host_copy import Mailbox


def test_on_the_cpu_they_are_here() -> None:
    sent = Mailbox(2).send(torch.tensor([3, 5], dtype=torch.int32))
    assert sent.has_arrived()
    assert sent.wait() == [3, 5]
    assert Mailbox(2).send(torch.tensor(0.5, dtype=torch.float64)).wait() == [0.5]


class OnAccelerator(torch.Tensor):
    """Numbers on the CPU that say they are on a GPU."""

    is_cuda = True


class Event:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Two numbers of a GPU that is played here: what a mailbox asks of it does nothing."""
    zeros = torch.zeros

    def pinned(*size, device: str, pin_memory: bool, **options) -> torch.Tensor:
        assert device == "cpu"  # named, for torch.set_default_device may say another
        assert pin_memory
        return zeros(*size, **options)

    numbers = torch.tensor([3, 5]).as_subclass(OnAccelerator)
    monkeypatch.setattr(torch, "zeros", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return numbers


def test_a_mailbox_that_inference_mode_used_first_is_there_for_training(accelerator) -> None:
    mailbox = Mailbox(1)
    with torch.inference_mode():
        assert mailbox.send(accelerator).wait() == [3, 5]
    assert mailbox.send(accelerator + 1).wait() == [4, 6]


@pytest.mark.gpu
def test_from_a_gpu_they_arrive_in_order_and_hold_their_values() -> None:
    """Two of a kind in the air at once; a third takes the first one's place."""
    mailbox = Mailbox(2)
    busy = torch.randn(8192, 8192, device="cuda")
    numbers = torch.zeros(2, device="cuda", dtype=torch.float64)
    for _ in range(8):
        busy = busy @ busy  # about 0.2 s, which the host does not wait for
    first = mailbox.send(numbers + 1)
    second = mailbox.send((numbers + 2).int())
    assert not first.has_arrived()
    assert second.wait() == [2, 2]
    assert first.has_arrived()
    assert first.wait() == [1.0, 1.0]
    third, fourth = mailbox.send(numbers + 3), mailbox.send(numbers + 4)
    assert third.wait() == [3.0, 3.0]
    assert fourth.wait() == first.wait() == [4.0, 4.0]
    assert second.wait() == [2, 2]

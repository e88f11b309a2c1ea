"""Numbers that travel to the host: on the CPU at once, from a GPU behind what it has to do."""

import pytest
import torch

from ratio_kl import host_copy
from ratio_kl.host_copy import Cells, Mailbox


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
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (0, 0, 1), raising=False)
    monkeypatch.setattr(host_copy, "_stream", lambda *of: None)
    return numbers


def test_a_mailbox_that_inference_mode_used_first_is_there_for_training(accelerator) -> None:
    mailbox = Mailbox(1)
    with torch.inference_mode():
        assert mailbox.send(accelerator).wait() == [3, 5]
    assert mailbox.send(accelerator + 1).wait() == [4, 6]


BUSY = 4_000_000_000
"""Clock cycles of a GPU: about 2 s, in which even a host with other things to do makes two calls.
"""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """Two at a time, in memory that need not be pinned because the kernels are played here."""
    monkeypatch.setattr(host_copy, "_pinned", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    return Cells(2)


def test_a_count_is_here_once_it_was_written(cells: Cells) -> None:
    for count in (3, 0):
        cell = cells.take(0)
        assert not cell.has_arrived()
        cell.place.fill_(count)
        assert cell.has_arrived()
        assert cell.wait() == [count]


def test_to_wait_for_a_count_is_to_wait_for_its_device(cells: Cells, monkeypatch) -> None:
    cell = cells.take(5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: cell.place.fill_(device))
    assert cell.wait() == [5]


def test_a_cell_is_used_again_once_its_count_was_read_and_not_before(cells: Cells) -> None:
    waiting = [cells.take(0) for _ in range(5)]
    addresses = {cell.place.data_ptr() for cell in waiting}
    assert len(addresses) == 5
    assert not any(address % 16 for address in addresses)  # no kernel is compiled for one alone
    for number, cell in enumerate(waiting):
        cell.place.fill_(number)
    assert [cell.wait() for cell in waiting[:2]] == [[0], [1]]
    again = [cells.take(0) for _ in range(3)]
    assert set(again[:2]) | {*waiting[2:]} >= {*waiting}
    assert not any(cell.has_arrived() for cell in again)
    assert [cell.wait() for cell in waiting[2:]] == [[2], [3], [4]]


@pytest.mark.gpu
def test_a_kernel_writes_its_count_to_the_host() -> None:
    """Behind other work it has not come yet; without a wait of the host's it comes by itself."""
    from ratio_kl.checks import values
    from ratio_kl.ops.linear_logprob import linear_logprob

    values.raise_pending(wait=True)
    hidden = torch.randn(70, 64, device="cuda")
    weight = torch.randn(130, 64, device="cuda")
    ids, mask = torch.arange(70, device="cuda") + 100, torch.arange(70, device="cuda") % 2 == 0
    for each in (None, mask):
        # Compiles: while that takes its time later, the counts would come.
        linear_logprob(hidden, weight, ids.clamp(max=129), each)
    values.raise_pending(wait=True)
    torch.cuda._sleep(BUSY)
    linear_logprob(hidden, weight, ids, mask)
    linear_logprob(hidden, weight, ids.clamp(max=129))
    assert len(values._pending[0]) == 2
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"got 20 active token\(s\)"):
        linear_logprob(hidden, weight, ids.clamp(max=129))
    values.raise_pending(wait=True)
    assert not values._pending[0]

    def bad_and_looked_for() -> None:
        linear_logprob(hidden, weight, ids)
        values.raise_pending(wait=True)

    with pytest.raises(ValueError, match=r"got 40 active token\(s\)"):
        bad_and_looked_for()


@pytest.mark.gpu
def test_no_kernel_is_compiled_for_where_its_count_goes() -> None:
    """Several counts on their way lie in several cells, all alike to the compiler."""
    from ratio_kl.ops.linear_logprob import linear_logprob
    from ratio_kl.ops.triton import call as triton_call

    hidden, weight = torch.randn(70, 64, device="cuda"), torch.randn(130, 64, device="cuda")
    ids = torch.arange(70, device="cuda")
    linear_logprob(hidden, weight, ids)
    known = len(triton_call._compiled), len(triton_call._calls)
    torch.cuda._sleep(BUSY // 4)
    for _ in range(4):
        linear_logprob(hidden, weight, ids)
    torch.cuda.synchronize()
    assert (len(triton_call._compiled), len(triton_call._calls)) == known


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_backward_of_another_gpu_than_the_current_one_raises() -> None:
    from ratio_kl.ops.linear_logprob import linear_logprob

    other = torch.device("cuda", 1)
    hidden = torch.randn(70, 64, device=other, requires_grad=True)
    weight, ids = torch.randn(130, 64, device=other), torch.arange(70, device=other)
    linear_logprob(hidden, weight, ids).logps.sum().backward()
    torch.cuda.synchronize(other)
    bad = ids + 80
    with torch.cuda.device(other):
        torch.cuda._sleep(BUSY // 4)
    out = linear_logprob(hidden, weight, bad)
    with pytest.raises(ValueError, match=r"got 20 active token\(s\)"):
        out.logps.sum().backward()


@pytest.mark.gpu
def test_a_backward_raises_before_its_gradients_can_be_used() -> None:
    """Though the host is ahead of the device, and a head so small needs no number from there."""
    from ratio_kl.ops.linear_logprob import linear_logprob

    hidden = torch.randn(70, 64, device="cuda", requires_grad=True)
    weight = torch.randn(130, 64, device="cuda", requires_grad=True)
    ids = torch.arange(70, device="cuda")
    linear_logprob(hidden, weight, ids).logps.sum().backward()
    hidden.grad = None
    bad = ids + 100  # now, for to load its kernel might wait for the device
    torch.cuda._sleep(BUSY // 4)
    out = linear_logprob(hidden, weight, bad)
    with pytest.raises(ValueError, match=r"got 40 active token\(s\)"):
        out.logps.sum().backward()
    assert hidden.grad is None


@pytest.mark.gpu
def test_from_a_gpu_they_arrive_in_order_and_hold_their_values() -> None:
    """Two of a kind in the air at once; a third takes the first one's place."""
    mailbox = Mailbox(2)
    numbers = torch.zeros(2, device="cuda", dtype=torch.float64)
    for each in (numbers + 1, (numbers + 2).int()):
        mailbox.send(each).wait()  # loads kernels, and makes the memory
    torch.cuda._sleep(BUSY)
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

"""Order and memory of pass 2: what is launched before the rows are counted, and where sums lie."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from kernels.head_cases import Case, assert_right, make_case
from ratio_kl.host_copy import HostCopy
from ratio_kl.kernels.tiles import tile_for
from ratio_kl.ops.contract import Needs, Saved, Want
from ratio_kl.ops.triton import gradients as triton_gradients
from ratio_kl.ops.triton import linear as triton_backend
from ratio_kl.ops.triton import products as triton_products
from ratio_kl.ops.triton import rows as triton_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE = tile_for(torch.device(DEVICE), torch.bfloat16)
N, V, H = TILE.rows + 6, 3 * TILE.columns + 24, 24
"""Two row tiles and four column tiles, both with a tail."""
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""A rounding of the inputs' dtype, twice: dx and the gradient."""


def with_rows(case: Case, kept: int) -> Case:
    """A gradient in `kept` rows, spread over all."""
    places = torch.arange(len(case.ids), device=DEVICE)
    rows = places * kept // len(places)
    first = torch.cat([rows.new_ones(1), rows.diff()]) > 0 if kept else rows < 0
    grads = torch.where(first, 1 + places / len(places), 0)
    assert int((grads != 0).sum()) == kept
    return case._replace(grad_logps=grads, grad_entropies=None)


def backward(case: Case, needs: Needs, done=None):
    scores = triton_backend.forward(case.head, case.ids, case.mask, want=Want(entropy=False))
    saved = Saved(case.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)
    return triton_backend.backward(
        case.head, saved, case.grad_logps, None, needs=needs, hidden_done=done
    )


# One block; a first block of all rows' width and wider ones for the few rows; rows cut too.
BUDGETS = (2**20, 40_000, 1)
FLOAT32 = [(torch.float32, kept, budget) for kept in (0, 33, N - 1, N) for budget in BUDGETS]
HALF = [(dtype, kept, 20_000) for dtype in (torch.bfloat16, torch.float16) for kept in (7, N)]


@pytest.mark.parametrize(("dtype", "kept", "chunk_bytes"), FLOAT32 + HALF, ids=str)
def test_any_number_of_rows(dtype, kept, chunk_bytes):
    case = make_case(N, V, H, dtype=dtype, chunk_bytes=chunk_bytes, device=DEVICE)
    assert_right(with_rows(case, kept), tolerance=TOLERANCE[dtype])


# Narrower than a tile, and one tile and a part: the first block's memory, made for all rows, is
# just enough for N or N - 1 of them.
@pytest.mark.parametrize("vocab_size", [50, 66])
@pytest.mark.parametrize("kept", [1, N - 1, N])
def test_a_vocabulary_smaller_than_the_number_of_rows(kept, vocab_size):
    case = make_case(N, vocab_size, H, dtype=torch.float16, modifiers=("bias",), device=DEVICE)
    assert_right(with_rows(case, kept), tolerance=TOLERANCE[torch.float16])


@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("needs", [Needs(True, True, False), Needs(False, True, False)], ids=str)
@pytest.mark.parametrize("early", [False, True], ids=["at the end", "handed over early"])
def test_the_device_has_work_while_the_host_waits(monkeypatch, hidden, needs, early):
    """Where d_hidden, written last, can hold the rows meanwhile: of their dtype and needed."""
    events = []
    launch, wait = triton_gradients.dlogits, HostCopy.wait
    monkeypatch.setattr(
        triton_gradients, "dlogits", lambda *args: (events.append("dx"), launch(*args))
    )
    monkeypatch.setattr(HostCopy, "wait", lambda self: (events.append("wait"), wait(self))[1])
    case = with_rows(make_case(20, 70, 16, device=DEVICE), kept=7)
    case = case._replace(head=dataclasses.replace(case.head, hidden=case.head.hidden.to(hidden)))
    backward(case, needs, done=(lambda gradient: None) if early else None)
    fits = hidden == torch.float32 and needs.hidden and not early
    assert events[: 2 if fits else 1] == (["dx", "wait"] if fits else ["wait"])
    assert events.count("dx") >= 1


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("early", [False, True], ids=["at the end", "handed over early"])
def test_a_small_head_computes_all_rows(monkeypatch, is_small, early):
    """Up to so many multiplications of a product the host reads nothing."""
    waits, handed = [], []
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda self: (waits.append(1), wait(self))[1])
    case = with_rows(make_case(20, 70, 16, device=DEVICE), kept=7)
    monkeypatch.setattr(triton_gradients, "SMALL", 20 * 70 * 16 - (not is_small))
    gradients = backward(case, Needs(True, True, False), done=handed.append if early else None)
    assert len(waits) == (not is_small)
    assert len(handed) == early
    assert int((gradients.hidden != 0).any(1).sum()) == 7
    assert_right(case, tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize("fits", [True, False])
def test_a_small_head_copies_all_rows_within_the_budget(monkeypatch, fits):
    """Of a few columns and many rows the copy may be most of it; dx has lines of 64 numbers."""
    copies = []
    blank_rows = triton_rows.blank_rows
    monkeypatch.setattr(
        triton_rows, "blank_rows", lambda *args: (copies.append(1), blank_rows(*args))[1]
    )
    monkeypatch.setattr(triton_gradients, "SMALL", 2**33)
    chunk_bytes = 4 * 70 * (300 + 64) - (not fits)
    case = with_rows(make_case(70, 3, 300, chunk_bytes=chunk_bytes, device=DEVICE), kept=7)
    assert_right(case, tolerance=TOLERANCE[torch.float32])
    assert len(copies) == fits


# 0: the rows are listed. A padded weight's gradient is not a product as it comes.
@pytest.mark.parametrize("small", [0, 2**33])
@pytest.mark.parametrize("modifiers", [(), ("vocab_size",)], ids=["one block", "blocks"])
def test_a_backward_inside_autocast_rounds_nothing(monkeypatch, small, modifiers):
    """As some trainers call it, here after a forward in fp32 outside."""
    monkeypatch.setattr(triton_gradients, "SMALL", small)
    case = with_rows(make_case(20, 70, 16, modifiers=modifiers, device=DEVICE), kept=7)
    outside = backward(case, Needs(True, True, False))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = backward(case, Needs(True, True, False))
    for name in ("hidden", "weight"):
        assert torch.equal(getattr(inside, name), getattr(outside, name)), name


# The last of the blocks of one tile has 24 columns; the sum of 9 rows in fp32 takes as much as 18.
@pytest.mark.parametrize(("rows", "lies_there"), [(9, True), (N, False)])
def test_the_sum_of_d_hidden_lies_in_d_weight_where_its_last_block_is_large_enough(
    monkeypatch, rows, lies_there
):
    sums = []
    made = triton_products._Sum.__init__

    def recorded(self, *args, **kwargs):
        made(self, *args, **kwargs)
        sums.append(self)

    monkeypatch.setattr(triton_products._Sum, "__init__", recorded)
    case = make_case(
        rows, V, H, dtype=torch.bfloat16, chunk_bytes=2 * rows * TILE.columns, device=DEVICE
    )
    case = case._replace(grad_logps=torch.ones(rows, device=DEVICE), grad_entropies=None)
    gradients = assert_right(case, tolerance=TOLERANCE[torch.bfloat16])[1]
    (of_hidden,) = (each for each in sums if each.out.shape[0] == rows)
    memory = gradients.weight.untyped_storage().data_ptr()
    assert of_hidden.buffer is not None
    assert (of_hidden.buffer.untyped_storage().data_ptr() == memory) == lies_there

"""The Triton backend's two passes against float64 full logits.

Runs in Triton's interpreter where there is no GPU (tiles of 64 x 64 x 32), else on the GPU.
"""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")
from kernels.head_cases import (
    ALL,
    MODIFIERS,
    TOLERANCE,
    assert_right,
    expected,
    make_case,
    relative_error,
    run,
    with_head,
)
from ratio_kl.ops.contract import Needs, Saved, Want
from ratio_kl.ops.torch import linear as torch_backend
from ratio_kl.ops.triton import gradients as triton_gradients
from ratio_kl.ops.triton import launch as triton_launch
from ratio_kl.ops.triton import linear as triton_backend
from ratio_kl.ops.triton import lists as triton_lists
from ratio_kl.ops.triton import rows as triton_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which warns of the NaN and inf that kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HALF = (torch.bfloat16, torch.float16)


# V: one column, less than a tile, a tile less and more one, two tiles and one, many, one tile more
# than the 128 that a row's merge reads at once.
# N: one row, part of a tile, two tiles and one. H: no multiple of the depth 32, of 8, of anything;
# two of the 128 terms that one sum of fp32 products holds, and some.
SIZES = [
    *((5, V, H) for V, H in zip((1, 7, 63, 65, 127, 1000), (16, 40, 33, 16, 40, 33), strict=True)),
    *product((1, 129), (129,), (40,)),
    (129, 7, 33),
    (5, 7, 300),
    (1, 8257, 16),
]


@pytest.mark.parametrize("modifiers", [(), MODIFIERS], ids=["plain", "modified"])
@pytest.mark.parametrize(("N", "V", "H"), SIZES)
def test_sizes(N, V, H, modifiers):
    assert_right(make_case(N, V, H, modifiers=modifiers, mask=True, device=DEVICE))


# 70 rows and 130 columns: two row tiles and three column tiles, both with a tail.
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_each_modifier_alone(modifier):
    assert_right(make_case(70, 130, 40, modifiers=(modifier,), device=DEVICE))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("modifiers", [(), MODIFIERS], ids=["plain", "modified"])
def test_half_precision(dtype, modifiers):
    assert_right(make_case(70, 130, 40, modifiers=modifiers, mask=True, dtype=dtype, device=DEVICE))


def test_softcap_of_logits_far_below_it():
    """Logits up to 12.4 under a cap of 50: tanh's series, at the end where its last term counts."""
    case = make_case(5, 130, 16, modifiers=("bias", "softcap"), device=DEVICE)
    bias = torch.linspace(-12.4, 12.4, 130, device=DEVICE)
    hidden, softcap = torch.zeros_like(case.head.hidden), torch.tensor(50.0, device=DEVICE)
    assert_right(with_head(case, hidden=hidden, bias=bias, softcap=softcap))


def test_a_bias_of_any_stride():
    case = make_case(70, 130, 40, modifiers=("bias",), mask=True, device=DEVICE)
    biases = torch.randn(130, 3, device=DEVICE)
    assert_right(with_head(case, bias=biases[:, 1]))
    assert_right(with_head(case, bias=biases[0, :1].expand(130)))


@pytest.mark.parametrize("temperature", [0.1, 2.0])
def test_one_temperature_for_all_rows(temperature):
    inverse = torch.tensor(1 / temperature, device=DEVICE)
    assert_right(with_head(make_case(5, 130, 40, device=DEVICE), inverse_temperature=inverse))


# Down to one tile; larger blocks; rows outermost where there are more of them than columns. Of 130
# rows some 90 are active and fewer have a gradient: still more than a tile's 64.
@pytest.mark.parametrize("chunk_bytes", [1, 40_000])
@pytest.mark.parametrize(("N", "V"), [(130, 140), (130, 40)])
def test_chunk_bytes_changes_no_score_and_gradients_by_rounding(N, V, chunk_bytes):
    case = make_case(N, V, 40, mask=True, modifiers=("bias", "temperature"), device=DEVICE)
    assert ((case.grad_logps != 0) | (case.grad_entropies != 0)).sum() > 64
    cut = with_head(case, chunk_bytes=chunk_bytes)
    for whole, part in zip(run(case)[0], run(cut)[0], strict=True):
        assert torch.equal(whole, part)
    assert_right(cut)


@pytest.mark.parametrize("compute_dtype", [torch.float32, *HALF])
def test_mixed_dtypes(compute_dtype):
    """hidden bf16, weight fp32, as under autocast or with an fp32 head (Liger-Kernel#305)."""
    case = make_case(70, 130, 40, modifiers=("bias",), device=DEVICE)
    hidden = case.head.hidden.to(compute_dtype).to(torch.bfloat16)
    weight = case.head.weight.to(compute_dtype).float()
    case = with_head(case, hidden=hidden, weight=weight, compute_dtype=compute_dtype)
    if compute_dtype == torch.float16:
        case = with_head(case, hidden=hidden.half().to(torch.bfloat16))
    gradients = assert_right(case, tolerance=8e-3)[1]
    assert gradients.hidden.dtype == torch.bfloat16
    assert gradients.weight.dtype == torch.float32
    in_fp32 = run(case, Needs(True, True, True, in_logits_dtype=True))[1]
    assert {g.dtype for g in in_fp32} == {torch.float32}


def test_strides_and_misaligned_rows_give_bitwise_the_same():
    """The pointer path, with tiles as the descriptors': aligned rows are the reference."""
    case = make_case(70, 130, 40, modifiers=MODIFIERS, mask=True, device=DEVICE)

    def moved(matrix, stride, offset):
        space = torch.full((matrix.shape[0] * stride + offset,), torch.nan, device=DEVICE)
        view = space[offset:].view(-1, stride)[:, : matrix.shape[1]]
        return view.copy_(matrix)

    reference = run(case)
    for hidden, weight in (
        (moved(case.head.hidden, 43, 1), moved(case.head.weight, 41, 3)),
        (case.head.hidden.T.contiguous().T, case.head.weight.T.contiguous().T),
    ):
        scores, gradients = run(with_head(case, hidden=hidden, weight=weight))
        for name, actual, wanted in zip(scores._fields, scores, reference[0], strict=True):
            assert torch.equal(actual, wanted), name
        for actual, wanted in zip(gradients, reference[1], strict=True):
            assert relative_error(actual, wanted) < 1e-6


def test_a_block_of_dx_is_the_same_by_pointer_and_nothing_lies_beside_it():
    """Rows of 192 numbers are stored by descriptor, of 131 by pointer; two and three tiles."""
    case = make_case(70, 130, 40, modifiers=MODIFIERS[:4], device=DEVICE)
    grads = case.grad_logps, case.grad_entropies
    saved = saved_of(case, run(case)[0])
    work = triton_launch.Rows(case.head.hidden, saved, grads)
    blocks = []
    for width in (192, 131):
        space = torch.full((72, width), torch.inf, device=DEVICE)
        triton_launch.dlogits(case.head, work, case.head.weight, space[:70, :130], (0, 0))
        blocks.append(space[:70, :130].clone())
        # A GPU's descriptor stores 16 bytes at a time: that row's own padding, to column 132.
        space[:70, : 132 if width == 192 else 130] = torch.inf
        assert (space == torch.inf).all()
    assert relative_error(*blocks) < 1e-6


@pytest.mark.parametrize("only", ["hidden", "weight", "bias"])
def test_needs(only):
    case = make_case(5, 130, 40, modifiers=("bias",), device=DEVICE)
    needs = Needs(**{name: name == only for name in ("hidden", "weight", "bias")})
    gradients = run(case, needs)[1]
    wanted = expected(case)
    for name in ("hidden", "weight", "bias"):
        gradient = getattr(gradients, name)
        assert (gradient is None) == (name != only)
        if gradient is not None:
            assert relative_error(gradient, getattr(wanted, name)) < 1e-6


def test_entropy_or_logp_gradient_alone():
    case = make_case(70, 130, 40, device=DEVICE)
    assert_right(case._replace(grad_entropies=None))
    assert_right(case._replace(grad_logps=None))


UNREAD = {
    "captured": ("_is_capturing", lambda tensor: True),
    "small": ("SMALL", 2**33),
}
"""What makes pass 2 compute all rows, so that the host reads nothing."""


@pytest.mark.parametrize("way", ["listed", *UNREAD])
def test_zero_and_nan_coefficients(way, monkeypatch):
    """Rows with zero coefficients do not matter in pass 2; NaN is not zero and stays visible."""
    if way in UNREAD:
        monkeypatch.setattr(triton_gradients, *UNREAD[way])
    case = make_case(70, 130, 40, device=DEVICE)
    scores, _ = run(case)
    zero = case._replace(grad_logps=torch.zeros_like(case.grad_logps), grad_entropies=None)
    assert all(not g.any() for g in run(zero)[1] if g is not None)

    spoilt = case.head.hidden.clone()
    spoilt[3] = torch.nan
    grads = case.grad_logps.clone()
    grads[3] = 0
    one_out = with_head(case._replace(grad_logps=grads, grad_entropies=None), hidden=spoilt)
    after = triton_backend.backward(one_out.head, saved_of(case, scores), grads, None, needs=ALL)
    assert not after.hidden[3].any()
    assert after.weight.isfinite().all()
    grads[3] = torch.nan
    after = triton_backend.backward(case.head, saved_of(case, scores), grads, None, needs=ALL)
    assert after.hidden[3].isnan().all()
    assert after.hidden[4].isfinite().all()


# 70 rows and 130 columns: several tiles each way. fp16's scale stays on the device.
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", UNREAD)
def test_the_same_without_a_host_read(dtype, entropy, way, monkeypatch):
    """All rows are computed, and those without a gradient give zeros whatever they hold."""
    case = make_case(
        70, 130, 40, modifiers=MODIFIERS, mask=True, entropy=entropy, dtype=dtype, device=DEVICE
    )
    off = ~case.mask
    case.head.hidden[off] = torch.nan
    listed = assert_right(case)[1]
    case.head.inverse_temperature[off] = torch.tensor([torch.nan, torch.inf, 0.0], device=DEVICE)[
        torch.arange(int(off.sum()), device=DEVICE) % 3
    ]
    monkeypatch.setattr(triton_gradients, *UNREAD[way])
    monkeypatch.setattr(triton_rows, "_mailbox", None)
    unread = assert_right(case)[1]
    frozen = run(case, Needs(True, False, False))[1]
    assert torch.equal(frozen.hidden, unread.hidden)
    assert not unread.hidden[off].any()
    for name in ("hidden", "weight", "bias"):
        assert relative_error(getattr(unread, name), getattr(listed, name)) < TOLERANCE[dtype]


def saved_of(case, scores):
    return Saved(case.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)


def test_a01_a10_a11_inactive_rows_are_isolated():
    """NaN and inf rows, any id under mask 0 (RL-Kernel#161, prime-rl#1525): exact zeros."""
    case = make_case(70, 130, 40, mask=True, device=DEVICE)
    off = ~case.mask
    hidden, ids = case.head.hidden.clone(), case.ids.clone()
    hidden[off] = torch.nan
    ids[off] = torch.tensor([-100, 130, 2**40], device=DEVICE)[torch.arange(int(off.sum())) % 3]
    clean, spoilt = run(case), run(with_head(case, hidden=hidden)._replace(ids=ids))
    for result in zip((*clean[0], *clean[1][:2]), (*spoilt[0], *spoilt[1][:2]), strict=True):
        assert torch.equal(*result)
    for score in spoilt[0][:4]:
        assert not score[off].any()
    assert not spoilt[1].hidden[off].any()


@pytest.mark.parametrize("place", [0, 100, 258])
def test_a04_all_but_one_logit_is_minus_infinity(place):
    """Whole tiles at -inf (flash-attention#1930): the finite one in the first, middle, last."""
    case = make_case(5, 259, 16, modifiers=("bias",), device=DEVICE)
    bias = torch.full((259,), -torch.inf, device=DEVICE)
    bias[place] = 10
    case = with_head(case, bias=bias)._replace(ids=torch.full((5,), place, device=DEVICE))
    scores, gradients = run(case)
    # The action's logit is summed in another order than its tile's: 0 up to that rounding.
    torch.testing.assert_close(scores.logps, torch.zeros_like(scores.logps), rtol=0, atol=2e-6)
    assert not scores.entropies.any()
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients.weight[:place].any()


def test_rounding_makes_no_log_prob_positive():
    """Sums of 300 products, in one order for the action's logit and in another for its tile's."""
    case = make_case(20, 3, 300, modifiers=("bias",), device=DEVICE)
    bias = torch.tensor([0.0, -torch.inf, -torch.inf], device=DEVICE)
    case = with_head(case, weight=10 * case.head.weight, bias=bias)
    scores, _ = run(case._replace(ids=torch.zeros_like(case.ids)))
    assert (scores.logps <= 0).all()
    torch.testing.assert_close(scores.logps, torch.zeros_like(scores.logps), rtol=0, atol=2e-5)


def test_a05_entropy_of_zero_probability():
    """p log p with p = 0 (trl#7221): entropies 0 and ln 2, finite gradients."""
    case = make_case(2, 3, 16, modifiers=("bias",), device=DEVICE)
    weight = torch.zeros_like(case.head.weight)
    bias = torch.tensor([0.0, 0.0, -torch.inf], device=DEVICE)
    case = with_head(case, weight=weight, bias=bias)
    case = case._replace(ids=torch.zeros(2, dtype=torch.long, device=DEVICE))
    scores, gradients = run(case)
    wanted = torch.full((2,), 2.0).log()
    torch.testing.assert_close(scores.entropies.cpu(), wanted, rtol=1e-6, atol=0)
    assert all(g.isfinite().all() for g in gradients)
    scores, gradients = run(with_head(case, bias=torch.tensor([0.0, -torch.inf, -torch.inf])
                                      .to(DEVICE)))  # fmt: skip
    assert not scores.entropies.any()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("peak", "wanted"), [(-80.0, 0.0), (-200.0, -6.907755278982137)])
def test_a09_tail_columns_are_not_counted(peak, wanted):
    """Rows past V loaded as 0 joined the denominator (verl#2656); all logits far below 0."""
    V = 1000
    case = make_case(2, V, 16, device=DEVICE)
    weight = torch.full((V, 16), -200 / 16, device=DEVICE)
    weight[3] = peak / 16
    case = with_head(case, hidden=torch.ones_like(case.head.hidden), weight=weight)
    scores, _ = run(case._replace(ids=torch.full((2,), 3, device=DEVICE)))
    assert scores.logps.tolist() == pytest.approx([wanted] * 2, abs=2e-6)


def test_a_common_offset_costs_no_digits():
    """Logits near 1e6 that float32 holds exactly; one lse would be off by 3 %."""
    case = make_case(5, 130, 16, device=DEVICE)
    hidden = torch.zeros_like(case.head.hidden)
    hidden[:, 0], hidden[:, 1] = 1024.0, 1.0
    weight = torch.zeros_like(case.head.weight)
    weight[:, 0] = 1024.0
    weight[:, 1] = torch.arange(130, device=DEVICE) % 8
    case = with_head(case, hidden=hidden, weight=weight)
    (scores, gradients), wanted = run(case), expected(case)
    torch.testing.assert_close(scores.logps.double(), wanted.logps, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.entropies.double(), wanted.entropies, rtol=1e-6, atol=0)
    assert relative_error(gradients.weight, wanted.weight) < 1e-5


def test_invalid_logits_of_active_rows_stay_visible():
    case = make_case(3, 130, 40, modifiers=("bias",), device=DEVICE)
    hidden = case.head.hidden.clone()
    hidden[1, 0] = torch.nan
    scores, _ = run(with_head(case, hidden=hidden))
    assert scores.logps.isnan().tolist() == [False, True, False]
    assert scores.entropies.isnan().tolist() == [False, True, False]
    bias = torch.full((130,), -torch.inf, device=DEVICE)
    assert run(with_head(case, bias=bias))[0].logps.isnan().all()
    ids = torch.full((3,), 3, device=DEVICE)
    for one in (torch.inf, torch.nan):
        bias = torch.zeros(130, device=DEVICE)
        bias[7] = one
        scores, _ = run(with_head(case, bias=bias)._replace(ids=ids))
        assert scores.logps.isnan().all(), one
        assert scores.entropies.isnan().all(), one


def test_ids_out_of_range():
    """Counted, logp NaN: the operator raises for the count, at once or at the host's next read."""
    case = make_case(5, 130, 40, modifiers=("vocab_size", "bias"), device=DEVICE)
    case.head.bias[0] = 50  # every row's top column, which is no such id
    ids = case.ids.clone()
    ids[1], ids[2] = -1, case.head.vocab_size
    for mask in (None, torch.tensor([True, True, False, True, True], device=DEVICE)):
        scores = triton_backend.forward(case.head, ids, mask, want=Want(False, statistics=True))
        assert scores.logps.isnan().tolist() == [False, True, mask is None, False, False]
        assert int(scores.bad_ids) == (2 if mask is None else 1)
        assert not scores.statistics[2, 1:3].any()


@pytest.mark.parametrize("at_once", [64, 32])
def test_rows_are_listed_or_picked(at_once, monkeypatch):
    """Few rows find their positions themselves; of more there is a list, made in steps of 8192.

    Here 70 rows: picked, and by lists of two steps of 64 and some, and of three of 32 and some.
    """
    case = make_case(70, 7, 16, modifiers=MODIFIERS, mask=True, device=DEVICE)
    case.mask[:3] = torch.tensor([False, True, True], device=DEVICE)
    ids = torch.where(case.mask, case.head.vocab_size, -1)
    bad = triton_backend.forward(case.head, ids, case.mask, want=Want(False)).bad_ids
    picked = run(case)
    monkeypatch.setattr(triton_lists, "PICKED_AT_ONCE", 0)
    monkeypatch.setattr(triton_lists, "LISTED_AT_ONCE", at_once)
    listed = run(case)
    for wanted, actual in zip((*picked[0], *picked[1]), (*listed[0], *listed[1]), strict=True):
        assert wanted is actual is None or torch.equal(wanted, actual)
    assert bad == case.mask.sum()
    assert triton_backend.forward(case.head, ids, case.mask, want=Want(False)).bad_ids == bad


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("N", [0, 5])
@pytest.mark.parametrize("backend", [triton_backend, torch_backend])
def test_bad_ids_are_counted_where_the_caller_says(backend, N, masked):
    case = make_case(N, 130, 40, mask=masked, device=DEVICE)
    ids = torch.full((N,), 130, device=DEVICE)
    place = torch.full((), -1, device="cpu", pin_memory=DEVICE == "cuda")
    scores = backend.forward(case.head, ids, case.mask, want=Want(False), bad_ids=place)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert scores.bad_ids is place
    assert int(place) == (N if case.mask is None else int(case.mask.sum()))


def test_bad_ids_of_many_rows():
    """Without a mask one program counts them, 1024 at a time, whatever part of the rows it has."""
    case = make_case(1100, 7, 16, chunk_bytes=1, device=DEVICE)
    ids = case.ids.clone()
    ids[::3] = 7
    assert int(triton_backend.forward(case.head, ids, None, want=Want(False)).bad_ids) == 367


@pytest.mark.parametrize("mask", [None, torch.zeros(0, dtype=torch.bool, device=DEVICE)])
def test_no_rows(mask):
    case = make_case(0, 130, 40, device=DEVICE)._replace(mask=mask)
    scores, gradients = run(case)
    assert scores.logps.shape == (0,)
    assert not gradients.weight.any()


def test_all_rows_masked():
    case = make_case(5, 130, 40, device=DEVICE)
    none = torch.zeros(5, device=DEVICE)
    case = case._replace(mask=none.bool(), grad_logps=none, grad_entropies=none)
    scores, gradients = run(case)
    assert not any(score.any() for score in scores)
    assert not gradients.hidden.any()
    assert not gradients.weight.any()


def test_inputs_are_not_written():
    case = make_case(70, 130, 40, modifiers=MODIFIERS, mask=True, device=DEVICE)
    tensors = [
        value
        for value in (*vars(case.head).values(), case.ids, case.mask, *case[3:])
        if isinstance(value, torch.Tensor)
    ]
    before = [value.clone() for value in tensors]
    run(case)
    assert all(map(torch.equal, tensors, before))

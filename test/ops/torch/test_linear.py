"""The torch backend by itself: invalid logits, ids without a tile, gradients in parts.

Its numbers are checked through linear_logprob and the loss.
"""

import math

import pytest
import torch
from torch import Tensor

from ratio_kl.ops.contract import Gradients, Head, Needs, Saved, Scores, Want
from ratio_kl.ops.torch import linear as torch_backend
from ratio_kl.reference import reference_logprob
from support import assert_close

FLOAT64 = 1e-12
# Several tiles both ways at the smallest size of 64 x 64; more rows than columns, and fewer.
SIZES = [(200, 70), (70, 200)]
H = 5


def head_of(N: int, V: int, dtype: torch.dtype = torch.float64, chunk_bytes: int = 1) -> Head:
    return Head(
        hidden=torch.randn(N, H, dtype=dtype),
        weight=torch.randn(V, H, dtype=dtype),
        bias=torch.randn(V, dtype=dtype),
        inverse_temperature=None,
        logit_scale=None,
        softcap=None,
        vocab_size=V,
        compute_dtype=dtype,
        chunk_bytes=chunk_bytes,
    )


def saved_of(ids: Tensor, scores: Scores) -> Saved:
    return Saved(
        action_ids=ids,
        logps=scores.logps,
        max=scores.max,
        log_sum=scores.log_sum,
        entropies=scores.entropies,
    )


def passes(head: Head, g: Tensor | None, h: Tensor | None, mask: Tensor | None = None, **needs):
    ids = torch.randint(0, head.vocab_size, (head.hidden.shape[0],))
    scores = torch_backend.forward(head, ids, mask, want=Want(h is not None))
    wanted = {"hidden": True, "weight": True, "bias": True, "in_logits_dtype": False} | needs
    return ids, torch_backend.backward(head, saved_of(ids, scores), g, h, needs=Needs(**wanted))


@pytest.mark.parametrize(("N", "V"), SIZES)
def test_max_and_log_sum_are_kept_apart(N: int, V: int) -> None:
    head = head_of(N, V)
    mask = torch.rand(N) > 0.3
    ids = torch.randint(0, V, (N,))
    scores = torch_backend.forward(head, ids, mask, want=Want(True))
    logits = head.hidden @ head.weight.T + head.bias
    peak = torch.where(mask, logits.amax(1), 0)
    log_sum = torch.where(mask, (logits - logits.amax(1, keepdim=True)).exp().sum(1).log(), 0)
    assert_close(scores.max, peak, FLOAT64, "max")
    assert_close(scores.log_sum, log_sum, FLOAT64, "log_sum")
    assert int(scores.bad_ids) == 0


@pytest.mark.parametrize("kind", ["g", "h", "both"])
@pytest.mark.parametrize(("N", "V"), SIZES)
def test_gradients_in_parts_are_those_of_the_whole(N: int, V: int, kind: str) -> None:
    head = head_of(N, V)
    g = torch.randn(N).double() if kind != "h" else None
    h = torch.randn(N).double() if kind != "g" else None
    torch.manual_seed(0)
    ids, whole = passes(head, g, h)
    leaves = [x.clone().requires_grad_() for x in (head.hidden, head.weight, head.bias)]
    logps, entropies = reference_logprob(leaves[0], leaves[1], ids, bias=leaves[2])
    total = sum((c * x).sum() for c, x in ((g, logps), (h, entropies)) if c is not None)
    for name, ours, theirs in zip(
        Gradients._fields, whole, torch.autograd.grad(total, leaves), strict=True
    ):
        assert_close(ours, theirs, FLOAT64, name)
    for name in Gradients._fields:
        torch.manual_seed(0)
        others = {other: False for other in Gradients._fields if other != name}
        _, part = passes(head, g, h, **others)
        assert torch.equal(getattr(part, name), getattr(whole, name))
        assert all(getattr(part, other) is None for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "V"), SIZES)
def test_a_half_precision_gradient_is_rounded_once(N: int, V: int, dtype: torch.dtype) -> None:
    head = head_of(N, V, dtype)
    g = torch.randn(N)
    torch.manual_seed(0)
    _, wide = passes(head, g, None, in_logits_dtype=True)
    torch.manual_seed(0)
    _, rounded = passes(head, g, None)
    for name in Gradients._fields:
        assert getattr(wide, name).dtype == torch.float32
        assert torch.equal(getattr(wide, name).to(dtype), getattr(rounded, name)), name


@pytest.mark.parametrize(("N", "V"), SIZES)
def test_invalid_logits_of_one_row_stay_in_it(N: int, V: int) -> None:
    head = head_of(N, V)
    head.hidden[3] = torch.nan
    head.hidden[4, 0] = torch.inf
    ids = torch.randint(0, V, (N,))
    scores = torch_backend.forward(head, ids, None, want=Want(True))
    bad = torch.zeros(N, dtype=torch.bool)
    bad[3:5] = True
    for values in (scores.logps, scores.entropies):
        assert torch.equal(values.isnan(), bad)


def test_every_logit_at_minus_infinity_is_no_distribution() -> None:
    # torch.log_softmax says NaN too: nothing is hidden.
    head = head_of(3, 130)
    head.bias.fill_(-math.inf)
    scores = torch_backend.forward(head, torch.zeros(3, dtype=torch.int64), None, want=Want(True))
    assert scores.logps.isnan().all()
    assert scores.entropies.isnan().all()


@pytest.mark.parametrize("column", [0, 63, 64, 129])
def test_a_logit_at_plus_infinity_is_no_distribution(column: int) -> None:
    head = head_of(3, 130)
    head.bias[column] = math.inf
    scores = torch_backend.forward(head, torch.zeros(3, dtype=torch.int64), None, want=Want(True))
    assert scores.logps.isnan().all()
    assert scores.entropies.isnan().all()


@pytest.mark.parametrize(("N", "V"), SIZES)
def test_logits_far_below_the_largest_cost_nothing(N: int, V: int) -> None:
    # Beyond -1e4 an exponential is 0 in float64 too; the action's own log-prob is still exact.
    head = head_of(N, V)
    head.hidden[:] = 0
    head.bias.fill_(-1e6)
    head.bias[7] = 0
    ids = torch.full((N,), 3)
    scores = torch_backend.forward(head, ids, None, want=Want(True))
    assert torch.equal(scores.logps, torch.full((N,), -1e6).double())
    assert torch.equal(scores.entropies, torch.zeros(N).double())
    needs = Needs(hidden=True, weight=True, bias=True, in_logits_dtype=False)
    ones = torch.ones(N).double()
    gradients = torch_backend.backward(head, saved_of(ids, scores), ones, ones, needs=needs)
    expected = torch.zeros(V).double()
    expected[3], expected[7] = N, -N
    assert torch.equal(gradients.bias, expected)


def test_no_row_left_gives_zeros() -> None:
    head = head_of(70, 130)
    none = torch.zeros(70, dtype=torch.bool)
    zeros = torch.zeros(70).double()
    _, gradients = passes(head, zeros, zeros, mask=none)
    for leaf, gradient in zip((head.hidden, head.weight, head.bias), gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_runs_are_equal_bit_for_bit() -> None:
    head = head_of(200, 300, torch.float32)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(passes(head, torch.randn(200), torch.randn(200))[1])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)

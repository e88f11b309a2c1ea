"""The custom operators as torch sees them, and what they are asked to compute."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from cases.meter import metered
from ratio_kl import linear_logprob
from ratio_kl.objective.sequences import packed_mask, segment_spread, segment_sum
from ratio_kl.ops.operators import linear_logprob_backward_op, linear_scores_op
from support import FLOAT64_TOLERANCE, assert_close

# The smallest sizes that are cut into several tiles both ways (tiles are at least 64 x 64).
N, H, V = 70, 5, 131


def flat(dtype: torch.dtype = torch.float32, *, modifiers: bool = False) -> dict:
    """Arguments of pass 1, by name."""
    factor = torch.tensor(0.7) if modifiers else None
    mask = torch.rand(N) > 0.3
    return {
        "hidden": torch.randn(N, H, dtype=dtype).requires_grad_(),
        "weight": torch.randn(V, H, dtype=dtype).requires_grad_(),
        "bias": torch.randn(V, dtype=dtype).requires_grad_() if modifiers else None,
        "action_ids": torch.randint(0, V - 3, (N,)),
        "mask": mask if modifiers else None,
        "inverse_temperature": torch.rand(N) + 0.5 if modifiers else None,
        "logit_scale": factor,
        "softcap": factor,
        "vocab_size": V - 3 if modifiers else V,
        "compute_dtype": dtype,
        "with_entropy": modifiers,
        "with_statistics": modifiers,
        "backend": "torch",
        "chunk_bytes": 1,
        "checks": "later",
    }


def backward_arguments(
    given: dict,
    g: Tensor | None,
    h: Tensor | None,
    needs: tuple[bool, bool, bool],
    in_logits_dtype: bool = False,
) -> tuple:
    """Arguments of pass 2 after pass 1 on `given`, as tensors that need no gradient."""
    with torch.no_grad():
        logps, entropies, peak, log_sum, *_ = linear_scores_op(*given.values())
    leaves = [None if x is None else x.detach() for x in itertools.islice(given.values(), 3)]
    modifiers = [given[name] for name in ("inverse_temperature", "logit_scale", "softcap")]
    saved = (logps, entropies, peak, log_sum)
    knobs = [given[name] for name in ("vocab_size", "compute_dtype", "backend", "chunk_bytes")]
    flags = (*needs, in_logits_dtype)
    return (*leaves, given["action_ids"], *modifiers, *saved, g, h, *knobs, *flags)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("modifiers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pass_1_is_a_well_behaved_operator(dtype: torch.dtype, modifiers: bool) -> None:
    opcheck(linear_scores_op.overload, tuple(flat(dtype, modifiers=modifiers).values()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("coefficients", ["g", "h", "both"])
def test_pass_2_is_a_well_behaved_operator(coefficients: str, needs) -> None:
    g = torch.randn(N) if coefficients != "h" else None
    h = torch.randn(N) if coefficients != "g" else None
    for dtype, in_logits_dtype in ((torch.float32, False), (torch.bfloat16, True)):
        arguments = backward_arguments(flat(dtype, modifiers=True), g, h, needs, in_logits_dtype)
        opcheck(linear_logprob_backward_op.overload, arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_segment_operators_are_well_behaved() -> None:
    offsets = torch.tensor([0, 2, 2, 7])
    opcheck(segment_sum, (torch.randn(9).requires_grad_(), offsets))
    opcheck(segment_spread, (torch.randn(3).requires_grad_(), offsets, 9))
    opcheck(packed_mask, (torch.arange(9) < 7, offsets, False, "later"))


@pytest.mark.parametrize("with_statistics", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("leaves", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("checks", ["later", "eager", "defer"])
def test_outputs_are_what_the_fake_says(
    leaves: torch.dtype, with_entropy: bool, with_statistics: bool, checks: str
) -> None:
    given = flat(leaves) | {"with_entropy": with_entropy, "with_statistics": with_statistics}
    given["checks"] = checks
    wide = torch.promote_types(leaves, torch.float32)
    logps, entropies, peak, log_sum, statistics, bad_values = linear_scores_op(*given.values())
    for per_row in (logps, peak, log_sum):
        assert (per_row.shape, per_row.dtype) == ((N,), wide)
    assert (entropies.shape, entropies.dtype) == ((N if with_entropy else 0,), wide)
    assert (statistics.shape, statistics.dtype) == ((3, N if with_statistics else 0), wide)
    counts = [0] if checks == "defer" else []
    assert (bad_values.tolist(), bad_values.dtype) == (counts, torch.int64)
    assert logps.requires_grad
    assert not any(x.requires_grad for x in (peak, log_sum, statistics, bad_values))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_pass_2_computes_what_is_needed(needs) -> None:
    given = flat(modifiers=True)
    arguments = backward_arguments(given, torch.randn(N), None, needs)
    everything = linear_logprob_backward_op(*arguments[:-4], True, True, True, False)
    with metered() as meter:
        some = linear_logprob_backward_op(*arguments)
    for needed, gradient, whole in zip(needs, some, everything, strict=True):
        assert torch.equal(gradient, whole) if needed else gradient.numel() == 0
    one_product = N * H * (V - 3)
    assert meter.multiplications == one_product * (1 + needs[0] + needs[1])


def scored(hidden: Tensor, mask: Tensor | None = None, **options):
    weight = torch.randn(V, H, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, V, (N,))
    out = linear_logprob(hidden, weight, ids, mask, return_entropy=True, chunk_bytes=1, **options)
    return weight, out


@pytest.mark.parametrize("active", [0, 1, 69, 70])
def test_inactive_rows_are_not_computed_in_pass_1(active: int) -> None:
    mask = torch.randperm(N) < active
    hidden = torch.randn(N, H, dtype=torch.float64)
    hidden[~mask] = torch.nan
    with metered() as meter, torch.no_grad():
        _, out = scored(hidden, mask)
    assert meter.multiplications == active * H * V
    for name in ("logps", "entropies"):
        value = getattr(out, name)
        assert torch.equal(value[~mask], torch.zeros(N - active).double()), name
        assert value[mask].isfinite().all(), name


@pytest.mark.parametrize("kept", [0, 1, 69, 70])
@pytest.mark.parametrize("use", ["logps", "entropies", "both"])
def test_rows_without_coefficients_are_not_touched_in_pass_2(kept: int, use: str) -> None:
    # They hold NaN by then: whatever reads them shows it in the weight's gradient.
    hidden = torch.randn(N, H, dtype=torch.float64).requires_grad_()
    weight, out = scored(hidden)
    rows = torch.randperm(N) < kept
    coefficients = torch.where(rows, torch.randn(N).double(), 0)
    total = sum(
        (coefficients * getattr(out, name)).sum()
        for name in ("logps", "entropies")
        if use in (name, "both")
    )
    expected = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    hidden.data[~rows] = torch.nan
    with metered() as meter:
        d_hidden, d_weight = torch.autograd.grad(total, [hidden, weight])
    assert meter.multiplications == 3 * kept * H * V
    assert torch.equal(d_hidden, expected[0])
    assert torch.equal(d_weight, expected[1])
    assert not d_hidden[~rows].any()
    assert d_hidden[rows].all()


def test_a_nan_coefficient_is_not_zero() -> None:
    hidden = torch.randn(N, H, dtype=torch.float64).requires_grad_()
    weight, out = scored(hidden)
    coefficients = torch.zeros(N).double()
    coefficients[3] = torch.nan
    d_hidden, d_weight = torch.autograd.grad((coefficients * out.logps).sum(), [hidden, weight])
    assert d_hidden[3].isnan().all()
    assert not d_hidden[torch.arange(N) != 3].any()
    assert d_weight.isnan().all()


def test_coefficients_of_one_kind_may_be_zero_where_the_other_is_not() -> None:
    hidden = torch.randn(N, H, dtype=torch.float64).requires_grad_()
    weight, out = scored(hidden)
    g = torch.where(torch.arange(N) % 3 == 0, torch.randn(N).double(), 0)
    h = torch.where(torch.arange(N) % 4 == 0, torch.randn(N).double(), 0)
    parts = [
        torch.autograd.grad(x, [hidden, weight], retain_graph=True)
        for x in ((g * out.logps).sum(), (h * out.entropies).sum())
    ]
    with metered() as meter:
        total = (g * out.logps).sum() + (h * out.entropies).sum()
        together = torch.autograd.grad(total, [hidden, weight])
    assert meter.multiplications == 3 * int(((g != 0) | (h != 0)).sum()) * H * V
    for whole, first, second in zip(together, *parts, strict=True):
        assert_close(whole, first + second, FLOAT64_TOLERANCE, "gradient")


def test_no_gradient_asked_for_is_no_pass_2() -> None:
    hidden = torch.randn(N, H, dtype=torch.float64).requires_grad_()
    with metered() as meter:
        _, out = scored(hidden)
        # Something else in the same graph is differentiated, and nothing of the operator.
        torch.autograd.grad((hidden.sum() + 0 * out.logps.detach().sum()), hidden)
    assert meter.passes == ["forward"]


def test_entropies_that_were_not_asked_for_may_be_summed() -> None:
    # They are a size-0 tensor, whose sum is 0 and whose gradient is nothing.
    leaves = [torch.randn(shape).requires_grad_() for shape in ((N, H), (V, H))]
    ids = torch.randint(0, V, (N,))
    out = linear_logprob(*leaves, ids)
    expected = torch.autograd.grad(out.logps.sum(), leaves, retain_graph=True)
    actual = torch.autograd.grad(out.logps.sum() + out.entropies.sum(), leaves)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_ids_out_of_range_raise_at_once() -> None:
    given = flat()
    given["action_ids"][[3, 8]] = torch.tensor([-1, V])
    with pytest.raises(ValueError, match="got 2 active token"):
        linear_scores_op(*given.values())


def test_a_named_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    hidden, weight, ids = torch.randn(2, H), torch.randn(V, H), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="backend='triton' cannot run here: .*not installed"):
        linear_logprob(hidden, weight, ids, backend="triton")
    assert linear_logprob(hidden, weight, ids).logps.isfinite().all()

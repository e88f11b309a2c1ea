"""ratio_kl on logits by Triton against float64 autograd of the documented formulas."""

import pytest
import torch

pytest.importorskip("triton")
from ratio_kl.ops.contract import LogitsSaved
from ratio_kl.ops.triton import logits as triton_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which warns of the NaN and inf that kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

B, T = 2, 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """64 columns a step, so that V of 65 and 200 take several."""
    monkeypatch.setattr(triton_logits, "LANES", 8)
    monkeypatch.setattr(triton_logits, "BLOCK_V", 64)


def inputs(V, dtype=torch.float32):
    """Logits that are slices: of every row's columns, and of all but the last position."""
    space = torch.randn(B, T + 1, V + 2, device=DEVICE).to(dtype)
    ids = torch.randint(V, (B, T), device=DEVICE)
    mask = torch.rand(B, T, device=DEVICE) < 0.7
    mask[0, 0], mask[0, 1] = True, False
    ref = torch.randn(B, T, V, device=DEVICE).to(dtype)
    return space[:, :-1, 1:-1], ref, ids, mask, torch.randn(B, T, device=DEVICE) - 2


def both(policy, ref, ids, mask, old, grad_ratio, grad_kl):
    scores = triton_logits.forward(policy, ref, ids, mask, old)
    saved = LogitsSaved(scores.ratio, scores.delta, scores.max, scores.log_sum)
    return scores, triton_logits.backward(policy, ids, mask, saved, grad_ratio, grad_kl)


def wanted(policy, ref, ids, mask, old, grad_ratio, grad_kl):
    leaf = policy.detach().double().requires_grad_()
    logp = leaf.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ref_logp = ref.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio = torch.where(mask, logp - old.double(), 0).exp()
    delta = torch.where(mask, ref_logp - logp, 0)
    kl = delta.exp() - delta - 1
    return ratio, kl, torch.autograd.grad((ratio * grad_ratio + kl * grad_kl).sum(), leaf)[0]


# One column, less than a step of 64, a step and one, several steps.
@pytest.mark.parametrize("V", [1, 7, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flat", [False, True])
def test_values_and_gradient(V, dtype, flat):
    given = inputs(V, dtype)
    grads = torch.randn(B, T, device=DEVICE), torch.randn(T, B, device=DEVICE).T
    if flat:
        given = tuple(value[1] for value in given)
        grads = tuple(value[1] for value in grads)
    scores, gradient = both(*given, *grads)
    ratio, kl, reference = wanted(*given, *grads)
    torch.testing.assert_close(scores.ratio.double(), ratio, rtol=1e-5, atol=0)
    torch.testing.assert_close(scores.kl.double(), kl, rtol=1e-5, atol=1e-5)
    # One rounding to the logits' dtype, twice that where the interpreter cuts off.
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(gradient.double(), reference, rtol=rounding, atol=1e-5)
    assert gradient.dtype == dtype


def test_columns_that_do_not_lie_side_by_side():
    """Logits of [V, B, T] memory, as vocabulary-major heads make them."""
    policy, ref, *rest = inputs(65)
    grads = torch.randn(B, T, device=DEVICE), torch.randn(B, T, device=DEVICE)
    given = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (policy, ref)]
    for actual, same in zip(
        both(*given, *rest, *grads), both(policy, ref, *rest, *grads), strict=True
    ):
        for a, b in zip(actual, same, strict=True):
            assert torch.equal(a, b)


def test_inactive_rows_are_never_read():
    """NaN, -inf and any id under mask 0: ratio 1, kl 0, gradient 0 (RL-Kernel#465)."""
    policy, ref, ids, mask, old = inputs(65)
    policy = torch.where(mask[..., None], policy, torch.nan)
    ref = torch.where(mask[..., None], ref, -torch.inf)
    ids = torch.where(mask, ids, -100)
    old = torch.where(mask, old, torch.inf)
    nan = torch.where(mask, 1.0, torch.nan)
    scores, gradient = both(policy, ref, ids, mask, old, nan, nan)
    assert (scores.ratio[~mask] == 1).all()
    assert not scores.kl[~mask].any()
    assert not gradient[~mask].any()
    assert gradient.isfinite().all()
    assert scores.ratio.isfinite().all()


def test_invalid_active_rows_stay_visible():
    policy, ref, ids, mask, old = inputs(65)
    policy = policy.clone()
    policy[0, 0, 3] = torch.nan
    one = torch.ones(B, T, device=DEVICE)
    scores, gradient = both(policy, ref, ids, mask, old, one, None)
    assert scores.ratio[0, 0].isnan()
    assert gradient[0, 0].isnan().any()


def test_one_gradient_alone():
    given = inputs(65)
    one, zero = torch.ones(B, T, device=DEVICE), torch.zeros(B, T, device=DEVICE)
    for grads, full in (((one, None), (one, zero)), ((None, one), (zero, one))):
        gradient = both(*given, *grads)[1]
        torch.testing.assert_close(
            gradient.double(), wanted(*given, *full)[2], rtol=1e-5, atol=1e-6
        )


def test_ids_out_of_range():
    policy, ref, ids, mask, old = inputs(65)
    ids[0, 0] = 65
    scores = triton_logits.forward(policy, ref, ids, mask, old)
    assert int(scores.bad_ids) == 1
    assert scores.ratio[0, 0].isnan()
    assert scores.kl[0, 0].isnan()

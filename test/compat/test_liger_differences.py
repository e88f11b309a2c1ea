"""Where Liger 0.8.5 gives another number on purpose: each test shows both and says why."""

import pytest
import torch

from compat.liger_cases import Batch, their_loss
from ratio_kl.compat.liger import LigerFusedLinearGRPOLoss
from ratio_kl.reference import reference_logprob
from support import relative_error


def both(batch, call=None, **options):
    """Loss of Liger and of the front."""
    call = call or {}
    return tuple(
        make(use_ref_model=False, **options)(*batch.required, **call)[0]
        for make in (their_loss, LigerFusedLinearGRPOLoss)
    )


def test_luspo_leaves_padding_out():
    """Liger multiplies [B, T] terms by the sequence's length and averages over all B T places,
    padding among them; TRL's formula is the sum over the sequence's own tokens, mean over B."""
    batch = Batch()
    call = {"old_per_token_logps": batch.old}
    theirs, ours = both(batch, call, loss_type="luspo")
    logps, _ = reference_logprob(batch.hidden, batch.weight, batch.ids)
    ratio = (logps - batch.old).exp()
    A = batch.advantages[:, None]
    term = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    expected = (term * batch.mask).sum() / len(batch.mask)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    lengths = batch.mask.sum(1, keepdim=True)
    assert theirs.item() == pytest.approx((term * lengths).mean().item(), rel=1e-4)
    padding = batch.mask == 0
    grads = [torch.autograd.grad(loss, batch.hidden)[0][padding] for loss in (theirs, ours)]
    assert grads[0].abs().max() > 1e-3
    assert not grads[1].any()


def test_vespo_leaves_the_sampling_ratio_of_padding_out():
    """Liger adds log vllm_is_ratio at padding to the sequence's weight."""
    batch = Batch()
    call = {"old_per_token_logps": batch.old, "vllm_is_ratio": batch.is_ratio}
    theirs, ours = both(batch, call, loss_type="vespo")
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)
    call["vllm_is_ratio"] = torch.where(batch.mask == 0, 5.0, batch.is_ratio)
    theirs, again = both(batch, call, loss_type="vespo")
    assert again == ours
    assert abs(theirs - ours) > 0.01 * abs(ours)


@pytest.mark.parametrize("name", ["hidden", "old", "is_ratio"])
def test_a01_nan_at_padding_changes_nothing(name):
    """Liger multiplies the mask in after the term is made, and 0 NaN is NaN (NeMo-RL#4120)."""
    batch = Batch()
    call = {"old_per_token_logps": batch.old, "vllm_is_ratio": batch.is_ratio}
    clean = both(batch, call)[1]
    with torch.no_grad():
        getattr(batch, name)[batch.mask == 0] = torch.nan
    theirs, ours = both(batch, call)
    assert theirs.isnan()
    assert ours == clean
    for grad in torch.autograd.grad(ours, (batch.hidden, batch.weight)):
        assert grad.isfinite().all()


def test_a_mask_is_no_weight():
    """Liger multiplies the terms by the mask's numbers; here what is not 0 is active."""
    batch = Batch()
    same = both(batch)
    batch.mask[:3] *= 0.1
    theirs, ours = both(batch)
    assert ours == same[1]
    assert abs(theirs - same[0]) > 0.01 * abs(same[0])


def test_a10_an_id_out_of_range_is_an_error():
    """Liger takes 0 for the logit of an id that no column has (RL-Kernel#161)."""
    batch = Batch()
    batch.ids[0, 0] = 50
    assert their_loss(use_ref_model=False)(*batch.required)[0].isfinite()
    with pytest.raises(ValueError, match=r"must lie in \[0, 50\)"):
        LigerFusedLinearGRPOLoss(use_ref_model=False)(*batch.required)


def test_a_log_ratio_of_100_stays_finite():
    """exp(100) overflows float32 in Liger; here log-ratios are clamped to +-20."""
    batch = Batch()
    batch.advantages.neg_().clamp_(max=-0.1)
    theirs, ours = both(batch, {"old_per_token_logps": batch.old - 100})
    assert not theirs.isfinite()
    assert ours.isfinite()


def test_a_first_chunk_that_is_all_minus_infinity():
    """Liger rescales by exp(-inf - -inf), NaN, where its first 4096 columns are ruled out."""
    batch = Batch(B=2, V=4100)
    bias = torch.zeros(4100)
    bias[:4096] = -torch.inf
    batch.ids.fill_(4097)
    theirs, ours = both(batch, {"bias": bias})
    assert theirs.isnan()
    logps, _ = reference_logprob(batch.hidden, batch.weight[4096:], batch.ids - 4096)
    ratio_one = -batch.advantages[:, None] * batch.mask
    assert ours.item() == pytest.approx((ratio_one.sum() / batch.mask.sum()).item(), rel=1e-5)
    grads = torch.autograd.grad(ours, batch.weight)[0]
    slopes = torch.autograd.grad((ratio_one * logps).sum() / batch.mask.sum(), batch.weight)[0]
    assert relative_error(grads, slopes) < 1e-5


def test_a_float32_head_is_not_rounded():
    """Liger casts the weight to the hidden states' bfloat16 first."""
    batch = Batch(V=300)
    batch.hidden = batch.hidden.detach().bfloat16().requires_grad_()
    wide = batch.in_float64()
    true = torch.autograd.grad(both(wide)[1], wide.weight)[0]
    theirs, ours = (
        relative_error(torch.autograd.grad(loss, batch.weight)[0], true) for loss in both(batch)
    )
    assert ours < 1e-5
    assert theirs > 1e-4


def test_a19_the_weights_gradient_is_summed_in_float32():
    """Liger rounds its bfloat16 sum after each of 64 chunks (Liger-Kernel#512)."""
    batch = Batch(B=64, T=4, dtype=torch.bfloat16)
    wide = batch.in_float64()
    true = torch.autograd.grad(both(wide)[1], wide.weight)[0]
    errors = [
        relative_error(torch.autograd.grad(loss, batch.weight)[0], true) for loss in both(batch)
    ]
    assert errors[1] < 4e-3  # rounded once to 8 bits
    assert errors[0] > 2 * errors[1]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "cispo", "epsilon_high": 5.0, "delta": 1.5},
        {"loss_type": "sapo", "delta": 1.5},
        {"loss_type": "vespo", "delta": 1.5},
    ],
)
def test_delta_where_no_ratio_is_capped_is_an_error(options):
    """Liger ignores it."""
    batch = Batch()
    theirs = their_loss(use_ref_model=False, **options)(*batch.required)[0]
    without = their_loss(use_ref_model=False, **(options | {"delta": None}))(*batch.required)[0]
    assert theirs == without
    with pytest.raises(ValueError, match="delta"):
        LigerFusedLinearGRPOLoss(**options)


def test_what_liger_refuses_and_the_front_does():
    """A sequence-level ratio in cispo and sapo, and per-token advantages."""
    batch = Batch()
    for options in ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "sapo"}):
        options["importance_sampling_level"] = "sequence"
        with pytest.raises(ValueError, match="not supported for loss_type"):
            their_loss(use_ref_model=False, **options)(*batch.required)
        assert LigerFusedLinearGRPOLoss(use_ref_model=False, **options)(*batch.required)[
            0
        ].isfinite()
    *inputs, advantages = batch.required
    per_token = advantages[:, None].expand_as(batch.mask)
    loss_fn = LigerFusedLinearGRPOLoss(use_ref_model=False)
    assert torch.equal(loss_fn(*inputs, per_token)[0], loss_fn(*inputs, advantages)[0])

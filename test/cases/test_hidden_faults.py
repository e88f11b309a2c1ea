"""Faults that give no sign: a wrong number, a gradient that hides NaN, an alias, a lost digit."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from cases.meter import metered
from ratio_kl import FusedLinearRatioKLLoss, ratio_kl
from ratio_kl.objective.policy import sapo

SCHEDULES = ["backward", "forward"]


def inputs() -> tuple[torch.Tensor, ...]:
    """Two sequences of three tokens over nine columns: hidden, weight, ids, mask, advantages."""
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    ids = torch.randint(9, (2, 3))
    return hidden, torch.randn(9, 4), ids, torch.ones(2, 3), torch.ones(2)


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.int8, 128), (torch.int8, 300), (torch.uint8, 256), (torch.int16, 65536)],
)
def test_ids_narrower_than_the_vocabulary(dtype, columns):
    """V in the ids' dtype wraps, and every id looks too large."""
    logits = torch.randn(2, columns)
    ids, rest = torch.tensor([5, 100]), (torch.ones(2), torch.zeros(2))
    wanted = ratio_kl(logits, logits, ids, *rest)[0]
    assert torch.equal(ratio_kl(logits, logits, ids.to(dtype), *rest)[0], wanted)


@pytest.mark.parametrize("grads", SCHEDULES)
def test_double_backward_is_refused(grads):
    hidden, *rest = inputs()
    loss = FusedLinearRatioKLLoss(grads=grads)(hidden, *rest).loss
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        (loss + grad.square().sum()).backward()


@pytest.mark.parametrize("grads", SCHEDULES)
def test_metrics_share_no_memory_with_the_loss(grads):
    """A trainer that scales its loss in place changed the metric."""
    out = FusedLinearRatioKLLoss(grads=grads)(*inputs())
    loss = out.loss
    loss /= 4
    assert out.metrics.policy_loss == -1


@pytest.mark.parametrize("ratio", [7.0, 10.0, 20.0])
def test_sapo_keeps_its_digits_far_from_one(ratio):
    """sigmoid near 1 has a gradient of s (1 - s), in which float32 loses all digits."""

    def slope(dtype: torch.dtype) -> torch.Tensor:
        log_ratio = torch.tensor(math.log(ratio), dtype=dtype, requires_grad=True)
        advantage = torch.ones((), dtype=dtype)
        sapo(log_ratio.exp(), advantage, temperature_pos=1.0, temperature_neg=1.0).backward()
        assert log_ratio.grad is not None
        return log_ratio.grad.double()

    torch.testing.assert_close(slope(torch.float32), slope(torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("grads", SCHEDULES)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss_type", ["dapo", "sapo", "cispo"])
@pytest.mark.parametrize("source", ["hidden", "old_logps", "ref_logps"])
def test_nan_on_an_active_token_reaches_the_gradient(source, loss_type, level, grads):
    """A NaN loss with finite gradients passes gradient clipping and loss scaling unnoticed."""
    hidden, weight, ids, _, advantages = inputs()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    given = {"old_logps": torch.full((2, 3), -2.0), "ref_logps": torch.full((2, 3), -2.0)}
    with torch.no_grad():
        (hidden[0] if source == "hidden" else given[source])[0] = math.nan
    if source != "hidden":
        given[source] = torch.where(torch.arange(3) == 0, given[source], -2.0)
    loss_fn = FusedLinearRatioKLLoss(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_high=0.3,
        beta=0.1,
        grads=grads,
    )
    out = loss_fn(hidden, weight, ids, mask, advantages, **given)
    out.loss.backward()
    assert out.loss.isnan()
    assert hidden.grad[0, 0].isnan().any()
    assert not hidden.grad[0, 2].any()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_nan_entropy_shows_where_the_mask_then_keeps_nothing(entropy_coef):
    """The threshold is NaN, no token reaches it, and a loss of 0 would look sound."""
    hidden, *rest = inputs()
    with torch.no_grad():
        hidden[0, 0] = math.nan
    loss_fn = FusedLinearRatioKLLoss(top_entropy_quantile=0.5, entropy_coef=entropy_coef)
    out = loss_fn(hidden, *rest)
    assert out.loss.isnan()
    assert out.metrics.high_entropy_fraction == 0


@pytest.mark.parametrize("grads", SCHEDULES)
def test_an_overflow_stays_in_active_rows(grads):
    hidden, weight, ids, _, _ = inputs()
    loss_fn = FusedLinearRatioKLLoss(
        importance_sampling_level="sequence_token", log_ratio_limit=None, grads=grads
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss_fn(hidden, weight, ids, mask, -torch.ones(2), torch.full((2, 3), -300.0)).loss.backward()
    assert not hidden.grad[mask == 0].any()


def test_numpy_scalars_are_numbers():
    wanted = FusedLinearRatioKLLoss(top_entropy_quantile=0.5)
    assert FusedLinearRatioKLLoss(top_entropy_quantile=np.float32(0.5)).config == wanted.config
    with pytest.raises(ValueError, match="beta must fit a float"):
        FusedLinearRatioKLLoss(beta=10**400)


def test_bad_offsets_read_nothing_out_of_bounds():
    """A segment that ends at 10**6 of 4 tokens: a crash, before anybody could raise."""
    code = (
        "import torch; from ratio_kl.objective.sequences import segment_sum;"
        "assert segment_sum(torch.ones(4), torch.tensor([0, 10**6])).item() == 4;"
        "assert segment_sum(torch.ones(4), torch.tensor([-9, 3, 2])).tolist() == [3, 0]"
    )
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["advantages", "sampling_ratio", "temperature"])
def test_one_dimension_that_could_be_tokens_or_sequences(name):
    """N = S with an empty sequence: [2] is one a sequence and one a token, and they differ."""
    hidden, weight, ids = torch.randn(2, 4), torch.randn(9, 4), torch.tensor([1, 2])
    given = {"advantages": torch.ones(2, 1), "cu_seqlens": torch.tensor([0, 0, 2])}
    given[name] = torch.tensor([5.0, 7.0])
    loss_fn = FusedLinearRatioKLLoss(loss_type="grpo")
    with pytest.raises(ValueError, match=r"cu_seqlens .*pass it as \[S, 1\] or \[1, N\]"):
        loss_fn(hidden, weight, ids, torch.ones(2), **given)
    for shape in ((2, 1), (1, 2)):
        loss_fn(hidden, weight, ids, torch.ones(2), **given | {name: given[name].reshape(shape)})
    given["cu_seqlens"] = torch.tensor([0, 1, 2])  # both readings are the same
    loss_fn(hidden, weight, ids, torch.ones(2), **given)


def test_a_mask_costs_no_copy_of_hidden():
    """The rows of pass 2 were gathered whole: 16 times the budget here."""

    def extra(tokens: int) -> int:
        hidden = torch.randn(4, tokens // 4, 512, requires_grad=True)
        weight = torch.randn(64, 512, requires_grad=True)
        ids, mask = torch.zeros(4, tokens // 4).long(), torch.arange(tokens).reshape(4, -1) % 2
        with metered() as meter:
            loss_fn = FusedLinearRatioKLLoss(chunk_bytes=2**16)
            loss_fn(hidden, weight, ids, mask, torch.randn(4)).loss.backward()
        return meter.peak - 4 * (hidden.numel() + weight.numel())

    # One tile of 64 x 64 takes twice the budget with its rows of 512; the rest is numbers a token.
    assert extra(4096) <= 8 * 2**16

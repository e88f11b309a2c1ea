"""Faults that users of such losses have met: the mask of high-entropy tokens."""

import pytest
import torch

from ratio_kl import FusedLinearRatioKLLoss, high_entropy_mask
from ratio_kl.config import LOSS_TYPES, RatioKLConfig
from support import problem, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a41_padding_has_no_part_in_the_threshold(dtype: torch.dtype) -> None:
    """Padding's entropy counted in the threshold (huggingface/trl#3709, #3833, ms-swift#5270).

    The 0.6-quantile of the five is 0.34: 0.4 and 0.5 are kept.
    """
    entropies = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5] + [9.0] * 100).to(dtype)
    mask = torch.tensor([1] * 5 + [0] * 100)
    order = torch.randperm(105)
    for index in (torch.arange(105), order):
        kept = high_entropy_mask(entropies[index], mask[index], 0.4)
        expected = (torch.arange(105)[index] == 3) | (torch.arange(105)[index] == 4)
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a41_in_the_loss_only_the_top_tokens_keep_their_policy_term(loss_type: str) -> None:
    """huggingface/trl#3709 end to end: entropies rise as |hidden| falls.

    5 active tokens, and 27 of padding whose logits are all 0: the largest entropy there is.
    """
    config = RatioKLConfig(
        loss_type=loss_type,
        top_entropy_quantile=0.4,
        epsilon_high=2.0,
        max_completion_length=16,
    )
    given = problem(1, config, B=2, T=16, poison=False).with_inputs(
        advantages=torch.ones(2).double(), attention_mask=torch.arange(32).view(2, 16) < 5
    )
    scale = torch.zeros(32).double()
    scale[:5] = torch.tensor([5.0, 4.0, 0.3, 3.0, 0.2]).double()
    direction = given.hidden[0, 0].detach()
    hidden = (scale[:, None] * direction).view(2, 16, 8).requires_grad_()
    result = run(
        FusedLinearRatioKLLoss(config), given.with_inputs(hidden=hidden).given(old_logps=None)
    )
    touched = result.grads["hidden"].abs().sum(-1).flatten() > 0
    assert touched.nonzero().flatten().tolist() == [2, 4]
    assert result.metrics["high_entropy_fraction"] == 0.4
    # The mask changes no denominator: the loss is the two kept terms over all five tokens.
    terms = (
        -result.outputs["logps"][0] if loss_type in ("cispo", "vespo") else torch.ones(16).double()
    )
    size = {"cispo": -1.0, "vespo": -1.0, "sapo": 2.0}.get(loss_type, 1.0)
    total = -size * (terms[2] + terms[4])
    divisor = {"grpo": 5 * 2, "sapo": 5 * 2, "dr_grpo": 16 * 2, "luspo": 2}.get(loss_type, 5)
    assert result.loss.item() == pytest.approx((total / divisor).item(), rel=1e-12)


def test_a41_a_threshold_of_each_part_would_differ() -> None:
    """huggingface/trl#3709: [.1, .2] and [.8, .9] at 0.5: the first part keeps none."""
    entropies = torch.tensor([[0.1, 0.2], [0.8, 0.9]])
    mask = torch.ones(2, 2)
    kept = high_entropy_mask(entropies, mask, 0.5)
    assert torch.equal(kept, torch.tensor([[False, False], [True, True]]))
    parts = torch.stack([high_entropy_mask(row, torch.ones(2), 0.5) for row in entropies])
    assert torch.equal(parts, torch.tensor([[False, True], [False, True]]))


def test_a41_the_threshold_does_not_depend_on_chunks() -> None:
    """huggingface/trl#3709: one threshold for the whole call, whatever the tiles."""
    config = RatioKLConfig(top_entropy_quantile=0.5)
    given = problem(2, config)
    untouched = []
    for chunk_bytes in (1, 2**17, 2**28):
        result = run(FusedLinearRatioKLLoss(config, chunk_bytes=chunk_bytes), given)
        untouched.append(result.grads["hidden"].abs().sum(-1) == 0)
    assert untouched[0][given.active].any()
    assert torch.equal(untouched[0], untouched[1])
    assert torch.equal(untouched[0], untouched[2])

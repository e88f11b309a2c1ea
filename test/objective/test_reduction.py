"""Each reduction against sums worked out by hand, and what cutting a batch does to it."""

import math

import pytest
import torch

from by_hand import REDUCED, REDUCED_MASK, REDUCED_TERMS
from ratio_kl import FusedLinearRatioKLLoss
from ratio_kl.config import LOSS_TYPES, RatioKLConfig
from ratio_kl.objective.policy import PRESETS
from ratio_kl.objective.reduction import REDUCTIONS, SPANS_THE_STEP, Counts
from ratio_kl.objective.sequences import Padded
from support import FLOAT64_TOLERANCE, Problem, problem, relative_error, run


def reduce(loss_type: str, mask: list, terms: list, items: float | None = None, ranks: int = 1):
    active, term = torch.tensor(mask).bool(), torch.tensor(terms, dtype=torch.float64)
    n = active.double()
    layout = Padded(tuple(active.shape))
    counts = Counts(
        layout=layout,
        tokens_of_sequence=layout.spread(layout.sum(n).clamp(min=1)),
        tokens=n.sum(),
        items=n.sum() if items is None else items,
        ranks=ranks,
    )
    config = RatioKLConfig(loss_type=loss_type, epsilon_high=1.5, max_completion_length=5)
    weight = REDUCTIONS[PRESETS[loss_type][1]](counts, config)
    return (torch.where(active, term, 0) * weight).sum().item()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_by_hand(loss_type: str) -> None:
    # Three sequences of 1, 3 and 0 tokens; the terms' sums are 1, 12 and 0.
    expected = REDUCED[loss_type]
    got = reduce(loss_type, REDUCED_MASK, REDUCED_TERMS)
    assert math.isclose(got, expected, rel_tol=1e-15)
    # Two ranks and 26 tokens in the optimizer step.
    by_items = loss_type in ("dapo", "cispo", "vespo")
    got = reduce(loss_type, REDUCED_MASK, REDUCED_TERMS, items=26, ranks=2)
    assert math.isclose(got, 1.0 if by_items else expected, rel_tol=1e-15)
    assert (PRESETS[loss_type][1] in SPANS_THE_STEP) == by_items


def test_sequence_mean_is_not_token_mean() -> None:
    # Lengths 1 and 9 with terms 1 and 3 (Liger-Kernel#626, A27).
    mask = [[1] + [0] * 8, [1] * 9]
    terms = [[1.0] * 9, [3.0] * 9]
    assert math.isclose(reduce("grpo", mask, terms), 2.0, rel_tol=1e-15)
    assert math.isclose(reduce("bnpo", mask, terms), 2.8, rel_tol=1e-15)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_active_token_is_no_division_by_zero(loss_type: str) -> None:
    assert reduce(loss_type, [[0, 0]], [[9.0, 9.0]], items=0) == 0


def rows(given: Problem, chosen: slice) -> Problem:
    """The chosen sequences of a problem; weight and bias stay."""
    hidden, weight, *tensors = given.inputs
    cut = {name: value[chosen] for name, value in given.options.items() if name != "bias"}
    kept = {name: value for name, value in given.options.items() if name == "bias"}
    inputs = (hidden[chosen], weight, *(value[chosen] for value in tensors))
    return Problem(inputs, kept | cut)


def lengths_one_to_eight(config: RatioKLConfig) -> Problem:
    given = problem(3, config, B=8, T=8, V=40, bias=True, sampling_ratio="token", poison=False)
    return given.with_inputs(attention_mask=torch.ones(8, 8, dtype=torch.bool).tril())


def summed(config: RatioKLConfig, given: Problem, size: int, **call) -> tuple[float, torch.Tensor]:
    loss_fn = FusedLinearRatioKLLoss(config, process_group="local")
    parts = [rows(given, slice(i, i + size)).given(**call) for i in range(0, 8, size)]
    results = [run(loss_fn, part) for part in parts]
    weight_grad = torch.stack([result.grads["weight"] for result in results]).sum(0)
    return sum(result.loss.item() for result in results), weight_grad


@pytest.mark.parametrize(
    "loss_type", ["grpo", "sapo", "dr_grpo", "luspo", "dapo", "cispo", "vespo"]
)
def test_cutting_a_batch_changes_nothing(loss_type: str) -> None:
    # One batch of lengths 1 to 8 against 2 x 4 and 8 x 1 micro-batches (trl#5619, A23).
    config = RatioKLConfig(loss_type=loss_type, epsilon_high=1.3, max_completion_length=8, beta=0.1)
    given = lengths_one_to_eight(config)
    whole, whole_grad = summed(config, given, 8, num_items_in_batch=36)
    for size in (4, 1):
        call = {"num_items_in_batch": 36, "gradient_accumulation_steps": 8 // size}
        loss, grad = summed(config, given, size, **call)
        assert math.isclose(loss, whole, rel_tol=FLOAT64_TOLERANCE)
        assert relative_error(grad, whole_grad) < FLOAT64_TOLERANCE


def test_cutting_into_equal_token_counts_changes_nothing_for_bnpo_and_the_bonus() -> None:
    config = RatioKLConfig(loss_type="bnpo", entropy_coef=0.1)
    given = lengths_one_to_eight(config)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:, :5] = True
    given = given.with_inputs(attention_mask=mask)
    whole, whole_grad = summed(config, given, 8)
    loss, grad = summed(config, given, 2, gradient_accumulation_steps=4)
    assert math.isclose(loss, whole, rel_tol=FLOAT64_TOLERANCE)
    assert relative_error(grad, whole_grad) < FLOAT64_TOLERANCE


def test_a_dropped_row_leaves_the_denominator_too() -> None:
    # 30 tokens, 5 of them in a truncated row: the mean is over 25 (trl#6369, A24).
    mask = [[1] * 5] * 5 + [[0] * 5]
    assert math.isclose(reduce("dapo", mask, [[1.0] * 5] * 6), 1.0, rel_tol=1e-15)
    assert math.isclose(reduce("bnpo", mask, [[1.0] * 5] * 6), 1.0, rel_tol=1e-15)

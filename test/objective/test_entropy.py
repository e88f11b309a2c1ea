"""The mask of high-entropy tokens and the entropy bonus, on one rank."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ratio_kl import high_entropy_mask
from ratio_kl.objective.entropy import entropy_bonus, entropy_mask


def mask_of(entropies: list[float], active: list[int], q: float) -> list[int]:
    values = torch.tensor(entropies, dtype=torch.float64)
    return high_entropy_mask(values, torch.tensor(active), q, group="local").int().tolist()


@pytest.mark.parametrize(
    ("q", "kept"),
    [
        (1.0, [1, 1, 1, 1, 1]),
        (0.5, [0, 0, 1, 1, 1]),  # rank 0.5 * 4 = 2: the token at the threshold is kept
        (0.4, [0, 0, 0, 1, 1]),  # rank 2.4
        (0.2, [0, 0, 0, 0, 1]),
        (0.0, [0, 0, 0, 0, 1]),  # the maximum
    ],
)
def test_padding_does_not_shift_the_threshold(q: float, kept: list[int]) -> None:
    # Valid entropies 0.1 to 0.5 beside 100 pads of entropy 9 (trl#3709, A41).
    entropies = [0.1, 0.2, 0.3, 0.4, 0.5] + [9.0] * 100
    assert mask_of(entropies, [1] * 5 + [0] * 100, q) == kept + [0] * 100


@pytest.mark.parametrize(
    ("q", "kept"),
    [
        (0.0, [0, 0, 0, 1, 1]),  # both maxima
        (0.2, [0, 0, 0, 1, 1]),
        (0.6, [0, 1, 1, 1, 1]),  # rank 1.6, between two that are equal: both are kept
        (0.7, [0, 1, 1, 1, 1]),
    ],
)
def test_ties_are_all_kept(q: float, kept: list[int]) -> None:
    assert mask_of([1.0, 2.0, 2.0, 5.0, 5.0], [1] * 5, q) == kept


def test_no_active_token_and_one() -> None:
    assert mask_of([1.0, 2.0], [0, 0], 0.5) == [0, 0]
    assert mask_of([1.0, 2.0], [1, 0], 0.5) == [1, 0]
    assert high_entropy_mask(torch.zeros(0), torch.zeros(0), 0.5, group="local").shape == (0,)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_inactive_entropies_do_not_matter(junk: float) -> None:
    assert mask_of([1.0, junk, 2.0, 3.0], [1, 0, 1, 1], 0.5) == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.8, 0.99])
def test_threshold_is_the_quantile_in_the_entropies_dtype(dtype: torch.dtype, q: float) -> None:
    # 1000 tokens make ranks whose rounding in float32 differs from float64.
    generator = torch.Generator().manual_seed(1)
    entropies = torch.rand(20, 50, generator=generator, dtype=torch.float64).to(dtype)
    active = torch.rand(20, 50, generator=generator) < 0.9
    wide = entropies if dtype == torch.float64 else entropies.float()
    threshold = torch.quantile(wide[active], 1 - q)
    expected = (wide >= threshold) & active
    assert 0 < expected.sum() < active.sum()
    got = high_entropy_mask(entropies, active, q, group="local")
    assert got.dtype == torch.bool
    assert torch.equal(got, expected)
    if dtype == torch.float64:
        by_numpy = np.quantile(wide[active].numpy(), 1 - q)
        assert int(got.sum()) == int((wide[active].numpy() >= by_numpy).sum())


def test_bonus_and_its_gradient() -> None:
    # Entropies 1, 2, 6 active and 9 inactive; q = 0.5 keeps 2 and 6: mean 4, gradient 1 / 2 each.
    entropies = torch.tensor([1.0, 2.0, 6.0, 9.0], dtype=torch.float64, requires_grad=True)
    active = torch.tensor([1, 1, 1, 0]).bool()
    for q, mean, slopes in [(0.5, 4.0, [0, 0.5, 0.5, 0]), (1.0, 3.0, [1 / 3, 1 / 3, 1 / 3, 0])]:
        bonus = entropy_bonus(entropies, entropy_mask(entropies, active, q, None))
        assert bonus.item() == mean
        (grad,) = torch.autograd.grad(bonus, entropies)
        assert grad.tolist() == slopes
    none = entropy_bonus(entropies, entropy_mask(entropies, torch.zeros_like(active), 0.5, None))
    assert none.item() == 0


def test_nan_entropy_shows_in_the_bonus_and_in_the_poison() -> None:
    entropies = torch.tensor([1.0, math.nan, 3.0])
    mask = entropy_mask(entropies, torch.ones(3).bool(), 0.5, None)
    assert mask.poison.isnan()
    assert not mask.keep.any()
    assert entropy_bonus(entropies, mask).isnan()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None, torch.ones(2), 0.5), TypeError, "entropies"),
        ((torch.ones(2), [1, 1], 0.5), TypeError, "mask"),
        ((torch.ones(2).int(), torch.ones(2), 0.5), ValueError, "entropies"),
        ((torch.ones(2), torch.ones(3), 0.5), ValueError, "mask"),
        ((torch.ones(2), torch.ones(2), 1.5), ValueError, "top_entropy_quantile|quantile"),
        ((torch.ones(2), torch.ones(2), math.nan), ValueError, "quantile"),
        ((torch.ones(2), torch.ones(2), None), TypeError, "quantile"),
        ((torch.ones(2), torch.ones(2), True), TypeError, "quantile"),
    ],
)
def test_errors(arguments: tuple[Tensor, Tensor, float], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        high_entropy_mask(*arguments, group="local")


def test_any_non_zero_mask_is_active():
    entropies = torch.tensor([0.1, 0.2, 0.3, 0.4])
    mask = torch.tensor([-1.0, 0.0, 0.5, -2.0])
    assert high_entropy_mask(entropies, mask, 0.5).tolist() == [False, False, True, True]

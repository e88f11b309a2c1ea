"""Inputs of the benchmark: sizes, masks and advantages of the cases, and files of inputs."""

import pytest
import torch

from benchmark import inputs, shapes
from benchmark.cases import CASES
from benchmark.problem import half_inactive, random_like, random_problem
from benchmark.shapes import Shape

CPU = torch.device("cpu")


def test_a_shape_is_read_as_it_is_printed():
    shape = Shape(8192, 4096, 131_072)
    assert shapes.parse(str(shape)) == shape
    assert (shape.sequences, shape.length) == (16, 512)
    assert (Shape(1152, 8, 9).sequences, Shape(1152, 8, 9).length) == (4, 288)


@pytest.mark.parametrize("text", ["8192x4096", "8192,4096,131072", "axbxc", "3000x8x9", "18x8x9"])
def test_a_shape_that_cannot_be_cut_into_sequences_is_refused(text):
    with pytest.raises(ValueError, match="N"):
        shapes.parse(text)


@pytest.mark.parametrize("seed", range(3))
def test_exactly_half_of_the_tokens_are_active(seed):
    mask = half_inactive(torch.ones(8, 50, dtype=torch.bool), seed)
    assert mask.sum() == 4 * 50
    assert (mask.sum(1) > 0).all()
    assert torch.equal(mask, mask.cummin(1).values), "an active token behind an inactive one"


def test_half_of_the_active_tokens_keep_an_advantage():
    """The case's shares are exact, so that its limit speaks of the work that was there to do."""
    problem = CASES["inactive_zero"].thin(
        random_problem(Shape(256, 4, 8), torch.float32, CPU, 0), 0
    )
    paid = problem.mask & (problem.advantages != 0)[:, None]
    assert problem.mask.sum() == 128
    assert paid.sum() == 64
    assert problem.active_share == 0.5


def test_a_case_changes_nothing_that_it_does_not_name():
    made = random_problem(Shape(64, 4, 8), torch.float32, CPU, 0)
    frozen = CASES["frozen"].thin(made, 0)
    assert not frozen.weight.requires_grad
    assert frozen.leaves == (made.hidden,)
    assert frozen.mask.all()
    assert (frozen.advantages != 0).all()
    assert made.weight.requires_grad, "the case changed the problem that it was given"


def test_a_file_of_inputs_is_unpacked_by_hand(tmp_path):
    """Two rows of 64 columns: two blocks a row, each with its own scale."""
    integers = torch.arange(-64, 64, dtype=torch.int8).view(2, 64)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]], dtype=torch.float16)
    fields = {
        "hidden": torch.randn(4, 3, 64).bfloat16(),
        "action_ids": torch.randint(2, (4, 3), dtype=torch.int32),
        "mask": torch.rand(4, 3) < 0.5,
        "advantages": torch.randn(4),
        "scales": scales,
        "integers": integers,
    }
    torch.save(fields, tmp_path / "inputs.pt")
    problem = inputs.load(tmp_path / "inputs.pt", torch.float32, CPU)
    expected = integers.float()
    expected[0, :32] *= 0.5
    expected[0, 32:] *= 2
    expected[1, 32:] *= 0.25
    assert torch.equal(problem.weight.detach(), expected)
    assert problem.shape == Shape(12, 64, 2)
    other = random_like(problem, 0)
    assert other.hidden.shape == problem.hidden.shape
    assert torch.equal(other.mask, problem.mask)
    assert not torch.equal(other.hidden, problem.hidden)

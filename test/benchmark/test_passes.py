"""The passes alone compute what the whole does."""

import pytest
import torch

from benchmark import passes
from benchmark.cases import CASES
from benchmark.oracle import largest_error, relative_error, truth
from benchmark.problem import random_problem
from benchmark.rivals import OURS, load
from benchmark.shapes import Shape

# Several sequences; a vocabulary of more than one tile, the last one cut.
PROBLEM = random_problem(Shape(32, 24, 1000), torch.float32, torch.device("cpu"), 0)


def test_pass_two_gives_the_gradients_of_the_policy_loss() -> None:
    run, outcome = passes.pass_two(PROBLEM)
    expected = truth(PROBLEM, gradients=True)
    d_hidden, d_weight, _ = run()
    assert relative_error(d_hidden.view_as(PROBLEM.hidden), expected.hidden) < 1e-5
    assert relative_error(d_weight, expected.weight) < 1e-5
    assert largest_error(outcome.logps, expected.logps, PROBLEM.mask) < 1e-5


@pytest.mark.parametrize("name", ["pass_one", "pass_two"])
def test_inputs_are_made_ready_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(passes, "_inputs", lambda problem, real=passes._inputs: (
        made.append(problem), real(problem))[1])  # fmt: skip
    call = load(OURS, CASES[name].job)
    other = PROBLEM.copy()
    with torch.no_grad():
        first, second = call(PROBLEM), call(other)
        assert call(PROBLEM) is first
        assert call(other) is second
    assert [id(each) for each in made] == [id(PROBLEM), id(other)]
    expected = truth(PROBLEM, gradients=False)
    assert largest_error(first.logps, expected.logps, PROBLEM.mask) < 1e-5

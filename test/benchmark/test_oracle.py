"""The benchmark's float64 truth against the library's long-hand reference, and its red light."""

from dataclasses import replace

import pytest
import torch

from benchmark import check, oracle, rivals
from benchmark.cases import CASES
from benchmark.logits_problem import random_logits
from benchmark.policy_loss import EPSILON
from benchmark.problem import random_problem
from benchmark.shapes import Shape
from ratio_kl.config import RatioKLConfig
from ratio_kl.reference import reference_loss

CPU = torch.device("cpu")
SMALL = Shape(64, 16, 300)
"""4 sequences of 16 tokens, so that pairs of sequences differ in length and in advantage."""
LOSSES = ("dense", "inactive", "zero", "inactive_zero", "quantile", "frozen")


@pytest.mark.parametrize("name", LOSSES)
def test_the_truth_is_the_reference_in_float64(name, monkeypatch):
    monkeypatch.setattr(oracle, "BLOCK_BYTES", 8 * 300 * 5)  # five tokens a block
    problem = CASES[name].thin(random_problem(SMALL, torch.float64, CPU, 0), 0)
    found = oracle.truth(problem, gradients=True)
    config = RatioKLConfig(
        loss_type="dapo", epsilon_low=EPSILON, top_entropy_quantile=problem.quantile
    )
    expected = reference_loss(
        config,
        problem.hidden,
        problem.weight,
        problem.action_ids,
        problem.mask,
        problem.advantages,
    )
    gradients = torch.autograd.grad(expected.loss, problem.leaves)
    # Two orders of summation in float64, over 300 terms.
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(found.logps, expected.logps, **close)
    torch.testing.assert_close(found.entropies, expected.entropies, **close)
    torch.testing.assert_close(found.hidden, gradients[0], **close)
    if name == "frozen":
        assert found.weight is None
    else:
        torch.testing.assert_close(found.weight, gradients[1], **close)


@pytest.mark.parametrize("name", ["quantile", "frozen", "forward", "forward_entropy"])
def test_ours_passes_the_check(name):
    problem = CASES[name].thin(random_problem(SMALL, torch.float32, CPU, 0), 0)
    assert check.failures(CASES[name], problem) == []


def test_ours_passes_the_check_on_logits():
    problem = random_logits(SMALL, torch.float32, CPU, 0)
    assert check.failures(CASES["logits"], problem) == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda out: out._replace(logps=out.logps + 1e-3), "logps"),
        (lambda out: out._replace(logps=out.logps * float("nan")), "logps"),
        (lambda out: out._replace(loss=out.loss * 1.001), "gradient of hidden"),
        (lambda out: out._replace(loss=out.loss + 1), "loss"),
    ],
)
def test_a_wrong_result_turns_the_check_red(spoil, complaint, monkeypatch):
    call = rivals.load(rivals.OURS, "loss")
    monkeypatch.setattr(check, "load", lambda *_: lambda problem: spoil(call(problem)))
    problem = random_problem(SMALL, torch.float32, CPU, 0)
    assert any(complaint in failure for failure in check.failures(CASES["dense"], problem))


def test_a_reduced_problem_keeps_the_case():
    made = random_problem(Shape(4096, 16, 20_000), torch.float32, CPU, 0)
    problem = replace(CASES["inactive"].thin(made, 0)).reduced(64, 10_000)
    assert problem.mask.shape == (4, 64)
    assert problem.weight.shape == (10_000, 16)
    assert 0 < problem.mask.sum() < problem.mask.numel()
    assert problem.action_ids.max() < 10_000

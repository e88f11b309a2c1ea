"""Every rival's call, where its library is installed and runs here, gives the same loss."""

import subprocess
import sys

import pytest
import torch

from benchmark import rivals
from benchmark.cases import CASES
from benchmark.oracle import largest_error, relative_error, truth
from benchmark.policy_loss import policy_loss
from benchmark.problem import random_problem
from benchmark.shapes import Shape

CPU = torch.device("cpu")
COMPILING = ("compiled", "liger_grpo")
"""Left out: they take half a minute to compile what the others run, too."""
NAMES = [n for n, c in rivals.CONTENDERS.items() if c.exact and n not in COMPILING]


@pytest.mark.parametrize("case", ["inactive_zero", "quantile", "forward"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rival_computes_the_case(name, case):
    made = random_problem(Shape(64, 16, 300), torch.float32, CPU, 0)
    problem = CASES[case].thin(made, 0)
    job = CASES[case].job
    try:
        call = rivals.load(name, job)
        with torch.set_grad_enabled(job == "loss"):
            out = call(problem)
    except (ImportError, rivals.Unsupported) as reason:
        pytest.skip(f"{name}: {reason}")
    expected = truth(problem, gradients=job == "loss")
    if out.logps is not None:
        # 300 float32 terms of size 1: some roundings of 6e-8 each.
        assert largest_error(out.logps.detach(), expected.logps, problem.mask) < 1e-5
    if job == "loss":
        loss = policy_loss(problem, out.logps, out.entropies) if out.loss is None else out.loss
        gradients = torch.autograd.grad(loss, problem.leaves)
        for gradient, true in zip(gradients, (expected.hidden, expected.weight), strict=True):
            assert relative_error(gradient, true) < 1e-5


def test_what_a_library_does_not_do_is_refused():
    with pytest.raises(rivals.Unsupported, match="'logits'"):
        rivals.refuse("logits", "loss", "forward")
    rivals.refuse("loss", "loss", "forward")


def test_no_rival_is_imported_before_it_is_asked_for():
    """A table of contenders costs nothing where none of them is installed."""
    code = (
        "import sys, benchmark.rivals, benchmark.run, benchmark.cases;"
        "names = {'trl', 'liger_kernel', 'verl', 'cut_cross_entropy', 'quack'};"
        "sys.exit(str(names & set(sys.modules)) if names & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a31_compiled_logits_are_among_the_rivals():
    """Compiled torch beat the fused kernel unseen (linkedin/Liger-Kernel#227, pytorch#124480)."""
    assert rivals.CONTENDERS["compiled"].exact
    test_a_rival_computes_the_case("compiled", "inactive_zero")

"""What holds for every front: it needs nothing of its package, and changes nothing in it."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

FRONTS = ("verl", "liger", "rl_kernel")

WITHOUT_PACKAGES = """
import sys
for absent in ("verl", "liger_kernel", "rl_engine", "triton", "transformers", "trl"):
    sys.modules[absent] = None
import ratio_kl.compat.{front}
"""

PATCHES_NOTHING = """
import sys
import torch
import liger_kernel.chunked_loss
import liger_kernel.ops
from benchmark.rivals.verl import import_alone

import_alone("verl.utils.kernel.linear_cross_entropy")
packages = [m for n, m in sys.modules.items() if n.split(".")[0] in ("liger_kernel", "verl")]
classes = {id(c): c for m in packages for c in vars(m).values() if isinstance(c, type)}
owners = [*packages, *classes.values(), torch.nn.Module, torch.Tensor, torch.nn.functional]
kept = [(owner, dict(vars(owner))) for owner in owners]

from ratio_kl.compat import liger, rl_kernel, verl

hidden, weight, ids = torch.randn(2, 3, 4), torch.randn(5, 4), torch.zeros(2, 3, dtype=torch.int64)
verl.linear_cross_entropy(hidden, weight, ids)
rl_kernel.linear_logp(hidden, weight, ids)
liger.LigerFusedLinearGRPOLoss(use_ref_model=False)(hidden, weight, ids, ids + 1, torch.ones(2))
liger.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden[0], weight, ids[0])
assert len(kept) > 50, len(kept)
for owner, before in kept:
    for name, value in before.items():
        assert vars(owner).get(name) is value, (owner, name)
"""


def run(script: str) -> None:
    """In a fresh process that finds modules where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("front", FRONTS)
def test_a_front_imports_without_its_package(front):
    run(WITHOUT_PACKAGES.format(front=front))


@pytest.mark.skipif(
    any(find_spec(package) is None for package in ("liger_kernel", "verl")),
    reason="needs liger-kernel and verl, and one of them is not installed",
)
def test_the_fronts_patch_nothing():
    """Every attribute of the packages' modules and classes is the one it was before."""
    run(PATCHES_NOTHING)

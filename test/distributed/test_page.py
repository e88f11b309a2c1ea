"""docs/distributed.md: its script under torchrun, its other blocks on two ranks."""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from documents import blocks, run
from ratio_kl import FusedLinearRatioKLLoss

PAGE = "docs/distributed.md"
H, TOKENS = 4, (2, 3)
ARGUMENTS = ("hidden", "own_rows", "action_ids", "mask", "advantages")


def test_the_script_on_two_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(blocks(PAGE, "python")[0].code)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node=2", str(script)]
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        # On a loaded machine torch itself now and then aborts while its threads end.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(H, H)])
        self.lm_head = nn.Linear(H, 10, bias=False)


def blocks_on_a_rank(rank, size):
    """Each rank has half of the head whose rows the page names, and half of each sequence."""
    torch.manual_seed(0)
    model, rows = Model(), 151_936 // size
    scope = {
        "FusedLinearRatioKLLoss": FusedLinearRatioKLLoss,  # the script imports it
        "model": model,
        "lm_head": model.lm_head,
        "tp_group": dist.group.WORLD,
        "cp_group": dist.group.WORLD,
        "dp_group": "local",
        "own_rows": torch.randn(rows, H),
        "own_bias": torch.randn(rows),
        "hidden": torch.randn(*TOKENS, H),
        "action_ids": torch.randint(rows, TOKENS),
        "mask": torch.ones(TOKENS),
        "advantages": torch.randn(TOKENS[0]),
    }
    for block in blocks(PAGE, "python"):
        if block.reason is None:
            run(block, scope)
    assert isinstance(model.lm_head.weight, DTensor)
    assert scope["weight"].shape == (10, H)
    scored = scope["out"].loss.item()
    again = scope["loss_fn"](*(scope[name] for name in ARGUMENTS))
    return scored, again.metrics.active_tokens.item()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_other_blocks(ranks):
    """The cut head gives both ranks one loss; sequences cut in two have the tokens of both."""
    (loss, tokens), other = ranks.run(blocks_on_a_rank)
    assert other == (loss, tokens)
    assert math.isfinite(loss)
    assert tokens == 2 * math.prod(TOKENS)

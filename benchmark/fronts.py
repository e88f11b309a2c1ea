"""What a front costs the host beyond the public call below it.

    python -m benchmark.fronts

The public call is replaced by one that gives the same answer at once, so that few microseconds are
not looked for in the noise of a whole pass. Medians, on whatever device there is.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ratio_kl import linear_logprob
from ratio_kl.compat import liger, liger_cross_entropy, rl_kernel, verl

CALLS = 2000
LIMIT = 20.0
"""Microseconds that a front may take."""


class Answer(nn.Module):
    """A loss that has its answer already."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.answer


def microseconds(call: Callable[[], Any]) -> float:
    """Median time on the host of a call."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[CALLS // 10 :])


def heads(device: torch.device) -> dict[str, Callable[[], Any]]:
    """The fronts of linear_logprob, each called as its package's models call it."""
    hidden = torch.randn(1, 8, 16, device=device, requires_grad=True)
    weight = torch.randn(64, 16, device=device, requires_grad=True)
    ids = torch.randint(64, (1, 8), device=device)
    flat = hidden[0].detach().requires_grad_()
    apply = liger.LigerFusedLinearScaledCrossEntropyFunction.apply
    return {
        "verl linear_cross_entropy": lambda: verl.linear_cross_entropy(hidden, weight, ids, 0.7),
        "RL-Kernel linear_logp": lambda: rl_kernel.linear_logp(flat, weight, ids[0]),
        "Liger scaled cross entropy": lambda: apply(flat, weight, ids[0], 1.0, -100, 1, True),
    }


def losses(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Liger's loss, whose clip metric takes work of its own at sequence level."""
    hidden = torch.randn(2, 8, 16, device=device, requires_grad=True)
    weight = torch.randn(64, 16, device=device, requires_grad=True)
    ids, mask = torch.randint(64, (2, 8), device=device), torch.ones(2, 8, device=device)
    inputs = (hidden, weight, ids, mask, mask[:, 0])
    made = {}
    for level in ("token", "sequence"):
        loss_fn = liger.LigerFusedLinearGRPOLoss(
            use_ref_model=False, importance_sampling_level=level, process_group="local"
        )
        loss_fn.loss_fn = Answer(loss_fn.loss_fn(*inputs))
        made[f"Liger GRPO loss, {level} level"] = lambda loss_fn=loss_fn: loss_fn(*inputs)
    return made


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flat, weight = torch.randn(8, 16, device=device), torch.randn(64, 16, device=device)
    ids = torch.randint(64, (8,), device=device)
    scores = linear_logprob(flat, weight, ids, return_entropy=True)
    found = {name: microseconds(call) for name, call in losses(device).items()}
    with (
        patch.object(verl, "linear_logprob", Answer(scores)),
        patch.object(rl_kernel, "linear_logprob", Answer(scores)),
        patch.object(liger_cross_entropy, "linear_logprob", Answer(scores)),
    ):
        found |= {name: microseconds(call) for name, call in heads(device).items()}
    print(f"{'host time of a front, us':<34}{'limit':>8}{device.type:>8}")
    for name, taken in found.items():
        print(f"{name:<34}{LIMIT:>8.0f}{taken:>8.1f}")


if __name__ == "__main__":
    main()

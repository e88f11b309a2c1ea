"""Peak memory of one forward and backward of the loss."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .policy import Policy, completion_states
from .rollout import Rollout


def loss_peak_bytes(policy: Policy, rollout: Rollout) -> int:
    """Most memory that the loss holds at once, over a forward and a backward, beyond gradients.

    Measured on the rollout's own hidden states, cut off from the model, so that nothing but the
    loss allocates. Counted: temporaries and saved tensors. Not counted: hidden and weight, and
    their gradients, which every loss must return.
    """
    with torch.no_grad():
        hidden = completion_states(policy.backbone, rollout.prompts, rollout.completions)
    hidden = hidden.clone().requires_grad_()
    weight = policy.lm_head.weight.detach().requires_grad_()

    def run() -> None:
        policy.loss_fn(
            hidden,
            weight,
            rollout.completions,
            rollout.mask,
            rollout.advantages,
            ref_logps=rollout.ref_logps,
        ).loss.backward()

    peak = _peak_on_gpu(run) if hidden.is_cuda else _peak_on_cpu(run)
    return peak - sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in (hidden, weight))


def _peak_on_gpu(run: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(run: Callable[[], None]) -> int:
    """Largest running sum of what PyTorch's CPU allocator handed out and took back.

    The profiler records each allocation to the byte; the process's resident size would miss pages
    that were free already and would count those that the C library keeps.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event["ts"]):
        held += change["args"]["Bytes"]
        peak = max(peak, held)
    return peak

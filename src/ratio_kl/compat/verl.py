"""verl's fused head: the call and the returns of `verl.utils.kernel.linear_cross_entropy`.

    from ratio_kl.compat.verl import linear_cross_entropy

verl 0.9. Needs nothing of verl and patches nothing; docs/migrating.md says where verl takes it.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks.arguments import check_floating, check_head, check_integer
from ..ops.contract import DEFAULT_CHUNK_BYTES
from ..ops.linear_logprob import linear_logprob

__all__ = ["linear_cross_entropy"]

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda logps: logps,
    "sum": torch.sum,
    "mean": torch.mean,
}
"""What is done to the log-probabilities; never to the entropies."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: object = None,
    *,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies, flat: [N] for hidden [..., H] of N tokens.

    Args:
        hidden: [..., H]; row t predicts labels at t.
        weight: [V, H]; with dist_process_group this rank's rows, as many as every other rank's.
        labels: int, as many as hidden has rows, of any shape.
        temperature: > 0; a float, or a tensor of one entry or of one a token, of any shape.
        reduction: "none", "sum" or "mean" (of all tokens) for the log-probabilities, in any case.
        dist_process_group: ranks over which the head is cut by rows; None: whole. Labels count all
            rows, the outputs are the whole head's on every rank, and the gradient of hidden is
            this rank's part, which verl's callers add up themselves.
        backend, chunk_bytes: as in linear_logprob; verl has no such arguments.

    Returns:
        (logprobs, entropy), float32 (float64 for float64 inputs): logprobs is [N], or 0-d where
        it is reduced; entropy is [N]. Both differentiable in hidden and weight.

    Raises:
        ValueError, TypeError: as linear_logprob; an unknown reduction.

    Reference: verl 0.9, verl/utils/kernel/linear_cross_entropy.py.
    """
    reduce = REDUCTIONS.get(reduction.lower()) if isinstance(reduction, str) else None
    if reduce is None:
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean'; got {reduction!r}")
    hidden, labels = check_floating("hidden", hidden), check_integer("labels", labels)
    if isinstance(temperature, Tensor):
        temperature = temperature.flatten() if temperature.numel() > 1 else temperature.squeeze()
    scores = linear_logprob(
        hidden.flatten(0, -2) if hidden.dim() > 2 else hidden,
        weight,
        labels.flatten(),
        temperature=temperature,
        return_entropy=True,
        backend=backend,
        chunk_bytes=chunk_bytes,
        **_cut_over(dist_process_group, hidden, weight),
    )
    return reduce(scores.logps), scores.entropies


def _cut_over(group: object, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
    """linear_logprob's keywords for a head cut in equal parts over a group."""
    if group is None:
        return {}
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            "dist_process_group must be None or a torch.distributed.ProcessGroup that this rank "
            f"belongs to; got {group!r} of type {type(group).__name__}"
        )
    rows = check_head(hidden, weight, None)[1].shape[0] * group.size()
    return {"tp_group": group, "tp_hidden_grad": "part", "vocab_size": rows}

"""verl's fused head: the call and the returns of `verl.utils.kernel.linear_cross_entropy`.

    from ratio_kl.compat.verl import linear_cross_entropy

verl 0.9. Needs nothing of verl and patches nothing; docs/migrating.md says where verl takes it.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..checks.arguments import check_floating, check_integer
from ..ops.contract import DEFAULT_CHUNK_BYTES
from ..ops.linear_logprob import linear_logprob

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
    *,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies, flat: [N] for hidden [..., H] of N tokens.

    Args:
        hidden: [..., H]; row t predicts labels at t.
        weight: [V, H].
        labels: int, as many as hidden has rows, of any shape.
        temperature: > 0; a float, or a tensor of one entry or of one a token, [N].
        reduction: "none", "sum" or "mean" (of all tokens) for the log-probabilities, in any case.
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
    scores = linear_logprob(
        hidden.flatten(0, -2) if hidden.dim() > 2 else hidden,
        weight,
        labels.flatten(),
        temperature=temperature,
        return_entropy=True,
        backend=backend,
        chunk_bytes=chunk_bytes,
    )
    return reduce(scores.logps), scores.entropies

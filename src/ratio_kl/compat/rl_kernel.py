"""RL-Kernel's operators `ratio_kl` and `linear_logp`: its calls and tensor contracts.

    from ratio_kl.compat.rl_kernel import linear_logp, ratio_kl

They stand for `kernel_registry.get_op("ratio_kl")` and `kernel_registry.get_op("linear_logp")` of
https://github.com/RL-Align/RL-Kernel. Needs nothing of RL-Kernel and patches nothing.
"""

from typing import Literal

from torch import Tensor

from ..objective.ratio import ratio_kl
from ..ops.contract import DEFAULT_CHUNK_BYTES
from ..ops.linear_logprob import linear_logprob

__all__ = ["linear_logp", "ratio_kl"]


def linear_logp(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None = None,
    *,
    vocab_start_index: int = 0,
    global_vocab_size: int | None = None,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """log_softmax(hidden @ lm_head_weight.T + bias)[target_ids], float32.

    Args:
        hidden: [B, S, D] or [N, D].
        lm_head_weight: [V, D].
        target_ids: [B, S] or [N], int, in [0, V).
        bias: [V] or None.
        vocab_start_index: global id of the first row of the weight.
        global_vocab_size: rows of the whole head; None: not checked.
        backend, chunk_bytes: as in linear_logprob; RL-Kernel has no such arguments.

    Returns:
        Shape of target_ids, float32 (float64 for float64 inputs), differentiable in hidden,
        lm_head_weight and bias.

    Raises:
        ValueError, TypeError: as linear_logprob; the weight is not all of the vocabulary.

    Reference: docs/operators/linear-logp.md of RL-Kernel.
    """
    if vocab_start_index != 0:
        raise ValueError(f"vocab_start_index must be 0 without a tp_group; got {vocab_start_index}")
    if global_vocab_size not in (None, lm_head_weight.shape[0]):
        raise ValueError(
            "global_vocab_size must be the rows of lm_head_weight without a tp_group, "
            f"{lm_head_weight.shape[0]}; got {global_vocab_size}"
        )
    return linear_logprob(
        hidden, lm_head_weight, target_ids, bias=bias, backend=backend, chunk_bytes=chunk_bytes
    ).logps

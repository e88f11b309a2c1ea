"""RL-Kernel's operators `ratio_kl` and `linear_logp`: its calls and tensor contracts.

    from ratio_kl.compat.rl_kernel import linear_logp, ratio_kl

They stand for `kernel_registry.get_op("ratio_kl")` and `kernel_registry.get_op("linear_logp")` of
https://github.com/RL-Align/RL-Kernel. Needs nothing of RL-Kernel and patches nothing.
"""

from collections.abc import MutableMapping
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..checks.arguments import check_floating
from ..config import check_int
from ..distributed.groups import Group, gather_over, resolve_cut
from ..objective.ratio_kl import ratio_kl
from ..ops.contract import DEFAULT_CHUNK_BYTES
from ..ops.linear_logprob import linear_logprob

__all__ = ["linear_logp", "ratio_kl"]


def linear_logp(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None = None,
    *,
    tp_group: object = None,
    vocab_start_index: int = 0,
    global_vocab_size: int | None = None,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """log_softmax(hidden @ lm_head_weight.T + bias)[target_ids], float32.

    Args:
        hidden: [B, S, D] or [N, D].
        lm_head_weight: [V, D]; with tp_group this rank's rows, in the order of the ranks.
        target_ids: [B, S] or [N], int, in [0, V) of the whole head.
        bias: [V], as many as lm_head_weight has rows, or None.
        tp_group: ranks over which the head is cut by rows; None: whole. The gradient of hidden is
            the whole head's on every rank.
        vocab_start_index: rows of the ranks before this one.
        global_vocab_size: rows of all ranks; None: whatever they are.
        backend, chunk_bytes: as in linear_logprob; RL-Kernel has no such arguments.

    Returns:
        Shape of target_ids, float32 (float64 for float64 inputs), differentiable in hidden,
        lm_head_weight and bias.

    Raises:
        ValueError, TypeError: as linear_logprob; vocab_start_index or global_vocab_size does not
            fit the rows of the ranks.

    Reference: docs/operators/linear-logp.md of RL-Kernel.
    """
    group = resolve_cut(tp_group, name="tp_group")
    weight = check_floating("lm_head_weight", lm_head_weight, sharded=True)
    if weight.dim() != 2:
        raise ValueError(f"lm_head_weight must have shape [V, D]; got {list(weight.shape)}")
    check_int("vocab_start_index", vocab_start_index)
    if global_vocab_size is not None:
        check_int("global_vocab_size", global_vocab_size)
    total = weight.shape[0]
    sharded: dict[str, Any] = {}
    if group is not None:
        total = _rows_of_all(tp_group, group, lm_head_weight, vocab_start_index, global_vocab_size)
        sharded = {"tp_group": tp_group, "vocab_size": total}
    elif vocab_start_index != 0:
        raise ValueError(f"vocab_start_index must be 0 without a tp_group; got {vocab_start_index}")
    if global_vocab_size not in (None, total):
        raise ValueError(
            f"global_vocab_size must be the rows of the whole head, {total}; "
            f"got {global_vocab_size}"
        )
    return linear_logprob(
        hidden,
        lm_head_weight,
        target_ids,
        bias=bias,
        backend=backend,
        chunk_bytes=chunk_bytes,
        **sharded,
    ).logps


_known: MutableMapping[Any, dict[tuple[int, int | None], tuple[int, int]]] = WeakKeyDictionary()
"""process group -> (rows, global_vocab_size) of this rank -> (its first row, rows of all ranks)."""


def _rows_of_all(
    process_group: object,
    group: Group,
    weight: Tensor,
    first_row: int,
    global_vocab_size: int | None,
) -> int:
    """Rows of all ranks. The ranks tell each other at the first call, and remember.

    Raises:
        ValueError: at the first call on every rank, if their rows do not follow each other in the
            order of the ranks; later on a rank that comes with another first row.
    """
    known = _known.setdefault(process_group, {})
    key = weight.shape[0], global_vocab_size
    if key not in known:
        own = torch.tensor([weight.shape[0], first_row], device=weight.device)
        gathered = gather_over(own, group).tolist()
        *expected, total = accumulate((rows for rows, _ in gathered), initial=0)
        _check_first_rows([first for _, first in gathered], expected)
        known[key] = first_row, total
    expected_row, total = known[key]
    _check_first_rows([first_row], [expected_row])
    return total


def _check_first_rows(first_rows: list[int], expected: list[int]) -> None:
    if first_rows != expected:
        raise ValueError(
            "vocab_start_index must count the rows of the ranks before, in the order of tp_group: "
            f"{expected}; got {first_rows}"
        )

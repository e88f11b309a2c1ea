"""The importance ratio and the KL penalty as operators, from hidden states or from logits."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..checks.arguments import (
    check_device,
    check_floating,
    check_head,
    check_integer,
    check_real,
    check_shape,
)
from ..config import check_real_option
from ..ops.backends import check_backend
from ..ops.contract import DEFAULT_CHUNK_BYTES
from ..ops.linear_logprob import linear_logprob
from ..ops.logits_logprob import logits_ratio_kl_op
from .kl import k3
from .ratio import bounded_exp, masked_difference


def linear_ratio_kl(
    hidden: Tensor,
    weight: Tensor,
    action_ids: Tensor,
    attention_mask: Tensor,
    old_logps: Tensor,
    *,
    ref_logps: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    bias: Tensor | None = None,
    log_ratio_limit: float | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    validate: Literal["eager"] | None = None,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    tp_group: object = None,
    tp_hidden_grad: Literal["whole", "part"] = "whole",
) -> tuple[Tensor, Tensor]:
    """Importance ratio and KL penalty of each token from hidden states, without logits.

        policy_ratio = exp(logp - old_logps)
        kl_penalty = exp(d) - d - 1,  d = ref_logp - logp        (the k3 estimator)

    `ratio_kl` for callers who hold hidden states: differentiable in hidden, weight and bias, and
    an inactive token gives ratio 1 and KL 0 whatever stands there.

    Args:
        hidden, weight, action_ids, attention_mask, bias, temperature, logit_scale, softcap,
            vocab_size, validate, backend, chunk_bytes, tp_group, tp_hidden_grad: as in
            linear_logprob.
        old_logps: like action_ids, log-probabilities under the behaviour policy.
        ref_logps: like action_ids, log-probabilities under the reference; or instead of them
        ref_hidden: like hidden, [..., H'], scored without gradient with
        ref_weight, ref_bias: [V', H'] and [V']; left out they are weight and bias, detached. With
            tp_group this rank's rows, cut as weight is.
        log_ratio_limit: clamp both log-ratios to +-this before exp; None: exp may overflow.

    Returns:
        (policy_ratio, kl_penalty), float32 (float64 for float64 inputs), shape of action_ids.

    Raises:
        ValueError, TypeError: as linear_logprob; the reference came twice or not at all.
    """
    if log_ratio_limit is not None:
        log_ratio_limit = check_real_option("log_ratio_limit", log_ratio_limit)
    _check_once(ref_logps, ref_hidden)
    check_head(hidden, weight, bias, tp_group=tp_group)
    per_row = {
        "attention_mask": check_real("attention_mask", attention_mask),
        "old_logps": check_floating("old_logps", old_logps),
    }
    if ref_logps is not None:
        per_row["ref_logps"] = check_floating("ref_logps", ref_logps)
    _check_per_row(per_row, "hidden", hidden)
    score = partial(
        linear_logprob,
        action_ids=action_ids,
        attention_mask=attention_mask,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        vocab_size=vocab_size,
        validate=validate,
        backend=backend,
        chunk_bytes=chunk_bytes,
        tp_group=tp_group,
        tp_hidden_grad=tp_hidden_grad,
    )
    if ref_hidden is not None:
        ref_weight = weight if ref_weight is None else ref_weight
        ref_bias = bias if ref_bias is None else ref_bias
        _check_reference(hidden, ref_hidden, ref_weight, ref_bias, tp_group)
        with torch.no_grad():
            ref_logps = score(ref_hidden, ref_weight, bias=ref_bias).logps
    assert ref_logps is not None
    logps = score(hidden, weight, bias=bias).logps
    mask = attention_mask != 0
    log_ratio = masked_difference(logps, old_logps.detach().to(logps.dtype), mask)
    delta = masked_difference(ref_logps.detach().to(logps.dtype), logps, mask)
    return bounded_exp(log_ratio, log_ratio_limit), k3(delta, log_ratio_limit)


def ratio_kl(
    policy_logits: Tensor,
    ref_logits: Tensor,
    action_ids: Tensor,
    attention_mask: Tensor,
    old_logps: Tensor,
    *,
    backend: Literal["torch", "triton"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Importance ratio and KL penalty of each token from logits, without a copy of them.

        policy_ratio = exp(logp - old_logps)
        kl_penalty = exp(d) - d - 1,  d = ref_logp - logp        (the k3 estimator)

    Differentiable in policy_logits; ref_logits, old_logps are constants. One read of the logits
    forward; backward writes their gradient and nothing else of that size. Inactive rows are never
    read: NaN, inf or any id there gives ratio 1, KL 0 and a gradient of exactly 0. On active rows
    invalid logits stay visible. Nothing is clamped: exp may overflow.

    Args:
        policy_logits: [B, T, V] or [N, V], floating point, any strides.
        ref_logits: like policy_logits, any floating dtype.
        action_ids: [B, T] or [N], int; in [0, V) on active tokens.
        attention_mask: like action_ids; bool, int or float, non-zero marks active tokens.
        old_logps: like action_ids, log-probabilities under the behaviour policy.
        backend: "torch", "triton", or None for the fastest that can run here.

    Returns:
        (policy_ratio, kl_penalty), float32 (float64 for float64 logits), shape of action_ids.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; an id of an active token is out of range
            (at once on the CPU, at the host's next read on an accelerator).
        TypeError: an argument is no tensor.

    Reference: the operator of this name in RL-Kernel.
    """
    check_backend(backend)
    policy = check_floating("policy_logits", policy_logits)
    reference = check_floating("ref_logits", ref_logits)
    if policy.dim() not in (2, 3) or policy.shape[-1] == 0:
        raise ValueError(
            "policy_logits must have shape [B, T, V] or [N, V] with V > 0; "
            f"got {list(policy.shape)}"
        )
    check_shape("ref_logits", reference, (tuple(policy.shape), "policy_logits.shape"))
    check_device("ref_logits", reference, policy.device, owner="policy_logits")
    ids = check_integer("action_ids", action_ids)
    mask = check_real("attention_mask", attention_mask)
    old = check_floating("old_logps", old_logps)
    per_row = {"action_ids": ids, "attention_mask": mask, "old_logps": old}
    _check_per_row(per_row, "policy_logits", policy)
    ratio, kl, *_ = logits_ratio_kl_op(
        policy, reference.detach(), ids, mask != 0, old.detach(), backend or ""
    )
    return ratio, kl


def _check_once(ref_logps: object, ref_hidden: object) -> None:
    if (ref_logps is None) == (ref_hidden is None):
        count = "neither" if ref_logps is None else "both"
        raise ValueError(f"the reference must come once, as ref_logps or ref_hidden; got {count}")


def _check_reference(
    hidden: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    ref_bias: Tensor | None,
    tp_group: object,
) -> None:
    check_device("ref_hidden", check_floating("ref_hidden", ref_hidden), hidden.device)
    check_head(ref_hidden, ref_weight, ref_bias, prefix="ref_", tp_group=tp_group)
    _check_per_row({"ref_hidden": ref_hidden[..., 0]}, "hidden", hidden)


def _check_per_row(tensors: dict[str, Tensor], owner: str, rows: Tensor) -> None:
    """Each named tensor has one entry for each row of `rows`, the argument `owner`."""
    for name, tensor in tensors.items():
        check_shape(name, tensor, (tuple(rows.shape[:-1]), f"{owner}.shape[:-1]"))
        check_device(name, tensor, rows.device, owner=owner)

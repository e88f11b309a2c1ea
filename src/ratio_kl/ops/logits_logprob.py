"""Ratio and KL from logits that the caller holds, as a custom operator.

The one place below the objective that knows a formula of the loss: one launch reads both logits
and writes two numbers a row, which it could not if ratio and KL were computed above it.
"""

from functools import partial

import torch
from torch import Tensor

from ..checks.values import bad_values_error, check_counts, raise_pending
from .backends import backend_for
from .contract import LogitsSaved
from .registration import differentiable, operator


@operator("logits_ratio_kl")
def logits_ratio_kl_op(
    policy_logits: Tensor,
    ref_logits: Tensor,
    action_ids: Tensor,
    mask: Tensor,
    old_logps: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ratio, kl, max, log_sum, delta, bad_ids (contract.LogitsScores)."""
    module = backend_for("logits", backend, policy_logits.device, policy_logits.dtype)
    scores = module.forward(policy_logits, ref_logits, action_ids, mask, old_logps)
    check_counts(scores.bad_ids, partial(bad_values_error, policy_logits.shape[-1]), "later")
    return tuple(scores)


@torch.library.register_fake("ratio_kl::logits_ratio_kl")
def _(policy_logits, ref_logits, action_ids, mask, old_logps, backend):
    dtype = torch.float64 if policy_logits.dtype == torch.float64 else torch.float32
    per_row = [policy_logits.new_empty(action_ids.shape, dtype=dtype) for _ in range(5)]
    return *per_row, policy_logits.new_empty((), dtype=torch.int64)


@operator("logits_ratio_kl_backward")
def logits_ratio_kl_backward_op(
    policy_logits: Tensor,
    action_ids: Tensor,
    mask: Tensor,
    ratio: Tensor,
    delta: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    grad_ratio: Tensor | None,
    grad_kl: Tensor | None,
    backend: str,
) -> Tensor:
    """Gradient of policy_logits."""
    module = backend_for("logits", backend, policy_logits.device, policy_logits.dtype)
    saved = LogitsSaved(ratio=ratio, delta=delta, max=peak, log_sum=log_sum)
    gradient: Tensor = module.backward(policy_logits, action_ids, mask, saved, grad_ratio, grad_kl)
    raise_pending(wait=False)
    return gradient


@torch.library.register_fake("ratio_kl::logits_ratio_kl_backward")
def _(policy_logits, action_ids, mask, ratio, delta, peak, log_sum, grad_ratio, grad_kl, backend):
    return policy_logits.new_empty(policy_logits.shape)


def _save_for_backward(ctx, inputs, output) -> None:
    policy_logits, _ref_logits, action_ids, mask, _old_logps, backend = inputs
    ratio, _kl, peak, log_sum, delta, bad_ids = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(peak, log_sum, delta, bad_ids)
    ctx.save_for_backward(policy_logits, action_ids, mask, ratio, delta, peak, log_sum)
    ctx.backend = backend


def _backward(ctx, grad_ratio, grad_kl, *_):
    if not ctx.needs_input_grad[0] or (grad_ratio is None and grad_kl is None):
        return (None,) * 6
    gradient = logits_ratio_kl_backward_op(*ctx.saved_tensors, grad_ratio, grad_kl, ctx.backend)
    return gradient, None, None, None, None, None


def _refuse_double_backward(ctx, *_):
    raise RuntimeError(
        "ratio_kl has no double backward: the gradient of policy_logits cannot be differentiated "
        "again. Use create_graph=False"
    )


differentiable(logits_ratio_kl_op, _backward, _save_for_backward)
differentiable(logits_ratio_kl_backward_op, _refuse_double_backward)

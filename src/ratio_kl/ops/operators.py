"""Pass 1 and pass 2 as custom operators, so that torch.compile sees one node each way.

Arguments are flat, because an operator takes no dataclass; floats travel as tensors, because a
Python float would recompile for each value. Inside, a backend gets them as a contract.Head.
"""

from functools import partial

import torch
from torch import Tensor

from ..checks.values import (
    bad_values_error,
    cell_for_count,
    check_cell,
    check_counts,
    raise_sent_before,
    sent_before_now,
)
from .backends import backend_for
from .contract import Head, Needs, Saved, Scores, Want
from .registration import differentiable, operator


def bad_value_counts(scores: Scores, inverse: Tensor | None, mask: Tensor | None) -> Tensor:
    """Counts of bad ids and, where the caller gave one a row, of bad temperatures.

    A 0-d temperature was a number, checked before it became a tensor.
    """
    if inverse is None or inverse.dim() == 0:
        return scores.bad_ids.reshape(1)
    bad = ~((inverse > 0) & (inverse < torch.inf))
    if mask is not None:
        bad = bad & mask
    return torch.stack([scores.bad_ids, bad.sum()])


@operator("linear_scores")
def linear_scores_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    action_ids: Tensor,
    mask: Tensor | None,
    inverse_temperature: Tensor | None,
    logit_scale: Tensor | None,
    softcap: Tensor | None,
    vocab_size: int,
    compute_dtype: torch.dtype,
    with_entropy: bool,
    with_statistics: bool,
    backend: str,
    chunk_bytes: int,
    checks: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pass 1 on flat rows: logps, entropies, max, log_sum, statistics (contract.Scores), counts
    of bad values (of size 0 if they are looked at here)."""
    head = Head(
        hidden, weight, bias, inverse_temperature, logit_scale, softcap,
        vocab_size, compute_dtype, chunk_bytes,
    )  # fmt: skip
    module = backend_for("linear", backend, hidden.device, compute_dtype)
    want, error = Want(with_entropy, with_statistics), partial(bad_values_error, vocab_size)
    one_count = inverse_temperature is None or inverse_temperature.dim() == 0
    cell = cell_for_count(hidden.device, checks) if one_count else None
    if cell is not None:
        scores = module.forward(head, action_ids, mask, want=want, bad_ids=cell.place)
        check_cell(cell, error)
    else:
        scores = module.forward(head, action_ids, mask, want=want)
        bad_values = bad_value_counts(scores, inverse_temperature, mask)
        check_counts(bad_values, error, checks)
        if checks == "defer":
            return *scores[:4], scores.statistics, bad_values
    return *scores[:4], scores.statistics, hidden.new_empty(0, dtype=torch.int64)


@torch.library.register_fake("ratio_kl::linear_scores")
def _(hidden, weight, bias, action_ids, mask, inverse_temperature, logit_scale, softcap,
      vocab_size, compute_dtype, with_entropy, with_statistics, backend, chunk_bytes,
      checks):  # fmt: skip
    want = Want(with_entropy, with_statistics)
    *scores, bad_values = empty_results(hidden, inverse_temperature, compute_dtype, want)
    return *scores, bad_values if checks == "defer" else bad_values.new_empty(0)


def empty_results(
    hidden: Tensor, inverse_temperature: Tensor | None, compute_dtype: torch.dtype, want: Want
) -> tuple[Tensor, ...]:
    """What the fake implementations of pass 1 return: as linear_scores_op, with every count."""
    dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    rows = hidden.shape[0]
    logps, peak, log_sum = (hidden.new_empty(rows, dtype=dtype) for _ in range(3))
    entropies = hidden.new_empty(rows if want.entropy else 0, dtype=dtype)
    statistics = hidden.new_empty((3, rows if want.statistics else 0), dtype=dtype)
    counts = 1 if inverse_temperature is None or inverse_temperature.dim() == 0 else 2
    bad_values = hidden.new_empty(counts, dtype=torch.int64)
    return logps, entropies, peak, log_sum, statistics, bad_values


@operator("linear_logprob_backward")
def linear_logprob_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    action_ids: Tensor,
    inverse_temperature: Tensor | None,
    logit_scale: Tensor | None,
    softcap: Tensor | None,
    logps: Tensor,
    entropies: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    grad_logps: Tensor | None,
    grad_entropies: Tensor | None,
    vocab_size: int,
    compute_dtype: torch.dtype,
    backend: str,
    chunk_bytes: int,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    in_logits_dtype: bool,
) -> list[Tensor]:
    """Pass 2 on flat rows: gradients of hidden, weight and bias, of size 0 where not needed."""
    head = Head(
        hidden, weight, bias, inverse_temperature, logit_scale, softcap,
        vocab_size, compute_dtype, chunk_bytes,
    )  # fmt: skip
    saved = Saved(action_ids, logps, peak, log_sum, entropies)
    needs = Needs(need_hidden, need_weight, need_bias, in_logits_dtype)
    module = backend_for("linear", backend, hidden.device, compute_dtype)
    forward_done = sent_before_now(hidden.device)
    gradients = module.backward(head, saved, grad_logps, grad_entropies, needs=needs)
    raise_sent_before(forward_done)
    return [hidden.new_empty(0) if gradient is None else gradient for gradient in gradients]


@torch.library.register_fake("ratio_kl::linear_logprob_backward")
def _(hidden, weight, bias, action_ids, inverse_temperature, logit_scale, softcap, logps,
      entropies, peak, log_sum, grad_logps, grad_entropies, vocab_size, compute_dtype,
      backend, chunk_bytes, need_hidden, need_weight, need_bias, in_logits_dtype):  # fmt: skip
    needs = Needs(need_hidden, need_weight, need_bias, in_logits_dtype)
    return empty_gradients((hidden, weight, bias), logps, needs)


def empty_gradients(
    leaves: tuple[Tensor, Tensor, Tensor | None], logps: Tensor, needs: Needs
) -> list[Tensor]:
    """What the fake implementations of pass 2 return."""
    dtype = logps.dtype if needs.in_logits_dtype else None
    return [
        leaf.new_empty(leaf.shape, dtype=dtype or leaf.dtype)
        if needed and leaf is not None
        else leaves[0].new_empty(0)
        for leaf, needed in zip(leaves, needs[:3], strict=True)
    ]


def _save_for_backward(ctx, inputs, output) -> None:
    (hidden, weight, bias, action_ids, mask, inverse_temperature, logit_scale, softcap,
     vocab_size, compute_dtype, with_entropy, _, backend, chunk_bytes, _) = inputs  # fmt: skip
    logps, entropies, peak, log_sum, statistics, bad_values = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(peak, log_sum, statistics, bad_values)
    ctx.save_for_backward(
        mask, hidden, weight, bias, action_ids, inverse_temperature, logit_scale, softcap,
        logps, entropies, peak, log_sum,
    )  # fmt: skip
    ctx.with_entropy = with_entropy
    ctx.knobs = (vocab_size, compute_dtype, backend, chunk_bytes)


def of_active_rows(grad: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """An inactive row's results are constants, whatever gradient comes in for them.

    A gradient that torch would negate as it reads is negated, which kernels do not.
    """
    if grad is None:
        return None
    return grad.resolve_neg() if mask is None else torch.where(mask, grad, 0)


def _backward(ctx, grad_logps, grad_entropies, *_):
    needs = ctx.needs_input_grad[:3]
    mask, *saved = ctx.saved_tensors
    grad_entropies = grad_entropies if ctx.with_entropy else None
    if (grad_logps is None and grad_entropies is None) or not any(needs):
        return (None,) * 15
    grad_logps = of_active_rows(grad_logps, mask)
    grad_entropies = of_active_rows(grad_entropies, mask)
    gradients = linear_logprob_backward_op(
        *saved, grad_logps, grad_entropies, *ctx.knobs, *needs, False
    )
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *(None,) * 12


def refuse_double_backward(ctx, *_):
    """The backward of a backward."""
    raise RuntimeError(
        "ratio_kl has no double backward: the gradient of hidden, weight and bias cannot be "
        "differentiated again. Use create_graph=False, or full logits for second derivatives"
    )


differentiable(linear_scores_op, _backward, _save_for_backward)
differentiable(linear_logprob_backward_op, refuse_double_backward)

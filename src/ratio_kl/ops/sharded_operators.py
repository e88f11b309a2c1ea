"""Pass 1 and pass 2 of a head whose rows are cut over ranks, as custom operators.

    pass 1   a backend scores this rank's rows; one gather puts the ranks' scores together
    pass 2   a backend takes the scores of the whole vocabulary: the gradients of this rank's rows
             are complete, that of hidden is a part, and the parts are added up in fp32

Between the passes every rank holds the same scores, bit for bit.
"""

from functools import partial

import torch
from torch import Tensor

from ..checks.values import bad_values_error, check_counts, raise_sent_before, sent_before_now
from ..distributed.groups import Group
from ..distributed.shared_sum import anchor_grad
from ..distributed.vocabulary import Cut, Parts, cut_of, gather_parts, merge
from .backends import backend_for
from .contract import Head, Needs, Saved, Scores, Want
from .operators import (
    bad_value_counts,
    empty_gradients,
    empty_results,
    of_active_rows,
    refuse_double_backward,
)
from .registration import differentiable, operator
from .sharding import PartOfHidden


@operator("sharded_scores")
def sharded_scores_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    anchor: Tensor | None,
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
    group: str,
    ranks: int,
    whole_hidden_grad: bool,
    hidden_trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As linear_scores_op, and whether hidden requires a gradient on any rank (0-d bool).

    anchor makes the results require a gradient where no leaf does, so that backward runs and
    takes part in the sum over ranks. whole_hidden_grad is for backward alone.
    """
    with torch.cuda.device_of(hidden):
        cut = cut_of(weight.shape[0], vocab_size, Group(group, ranks), hidden.device)
        head = Head(
            hidden, weight, bias, inverse_temperature, logit_scale, softcap,
            cut.size, compute_dtype, chunk_bytes,
        )  # fmt: skip
        ids = action_ids.to(torch.int64)
        module = backend_for("linear", backend, hidden.device, compute_dtype)
        own_ids = (ids - cut.first_row).clamp(0, cut.size - 1)
        own = module.forward(head, own_ids, mask, want=Want(with_entropy, with_statistics))
        scores, hidden_wanted = _over_ranks(
            own, ids, mask, cut, (Group(group, ranks), hidden_trains)
        )
        bad_values = bad_value_counts(scores, inverse_temperature, mask)
        check_counts(bad_values, partial(bad_values_error, vocab_size), checks)
        return *scores[:4], scores.statistics, bad_values, hidden_wanted


def _over_ranks(
    own: Scores, ids: Tensor, mask: Tensor | None, cut: Cut, says: tuple[Group, bool]
) -> tuple[Scores, Tensor]:
    """Scores under the whole vocabulary, and whether any rank says that hidden trains."""
    group, hidden_trains = says
    part = Parts(own.logps, own.max, own.log_sum, own.entropies, own.statistics)
    of_ranks, hidden_wanted = gather_parts(part, hidden_trains, group)
    merged = merge(of_ranks, cut, ids)
    bad = (ids < 0) | (ids >= cut.vocab_size)
    bad = bad if mask is None else bad & mask
    merged = merged._replace(logps=torch.where(bad, torch.nan, merged.logps))
    logps, peak, log_sum, entropies, statistics = (_of_active(each, mask) for each in merged)
    if statistics.numel() > 0:
        statistics[2].masked_fill_(bad, 0)
    return Scores(logps, entropies, peak, log_sum, bad.sum(), statistics), hidden_wanted


def _of_active(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 on inactive rows, always a new tensor."""
    if mask is None or values.numel() == 0:
        return values.clone()
    return torch.where(mask, values, 0)


@torch.library.register_fake("ratio_kl::sharded_scores")
def _(hidden, weight, bias, anchor, action_ids, mask, inverse_temperature, logit_scale, softcap,
      vocab_size, compute_dtype, with_entropy, with_statistics, *_):  # fmt: skip
    want = Want(with_entropy, with_statistics)
    results = empty_results(hidden, inverse_temperature, compute_dtype, want)
    return *results, hidden.new_empty((), dtype=torch.bool)


@operator("sharded_logprob_backward")
def sharded_logprob_backward_op(
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
    hidden_wanted: Tensor,
    grad_logps: Tensor | None,
    grad_entropies: Tensor | None,
    vocab_size: int,
    compute_dtype: torch.dtype,
    backend: str,
    chunk_bytes: int,
    group: str,
    ranks: int,
    whole_hidden_grad: bool,
    hidden_trains: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    in_logits_dtype: bool,
) -> list[Tensor]:
    """As linear_logprob_backward_op; weight and bias are this rank's rows.

    A rank whose own hidden needs no gradient computes its part where another's does.
    """
    with torch.cuda.device_of(hidden):
        cut = cut_of(weight.shape[0], vocab_size, Group(group, ranks), hidden.device)
        head = Head(
            hidden, weight, bias, inverse_temperature, logit_scale, softcap,
            cut.size, compute_dtype, chunk_bytes,
        )  # fmt: skip
        own_ids = action_ids.to(torch.int64) - cut.first_row
        # -1 lies in no tile.
        own_ids = torch.where((own_ids >= 0) & (own_ids < cut.size), own_ids, -1)
        together = whole_hidden_grad and (hidden_trains or _is_wanted(hidden_wanted))
        part = PartOfHidden(Group(group, ranks))
        done = part.start if together else None
        saved = Saved(own_ids, logps, peak, log_sum, entropies)
        needs = Needs(need_hidden or together, need_weight, need_bias, in_logits_dtype)
        module = backend_for("linear", backend, hidden.device, compute_dtype)
        forward_done = sent_before_now(hidden.device)
        gradients = module.backward(
            head, saved, grad_logps, grad_entropies, needs=needs, hidden_done=done
        )
        if together:
            total = part.finish(gradients.hidden)
            dtype = logps.dtype if in_logits_dtype else hidden.dtype
            gradients = gradients._replace(hidden=total.to(dtype) if need_hidden else None)
        raise_sent_before(forward_done)
        return [hidden.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _is_wanted(hidden_wanted: Tensor) -> bool:
    """Read on the host; under capture, where it cannot be, every rank takes it to be so."""
    if hidden_wanted.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(hidden_wanted)


@torch.library.register_fake("ratio_kl::sharded_logprob_backward")
def _(hidden, weight, bias, action_ids, inverse_temperature, logit_scale, softcap, logps,
      entropies, peak, log_sum, hidden_wanted, grad_logps, grad_entropies, vocab_size,
      compute_dtype, backend, chunk_bytes, group, ranks, whole_hidden_grad, hidden_trains,
      need_hidden, need_weight, need_bias, in_logits_dtype):  # fmt: skip
    needs = Needs(need_hidden, need_weight, need_bias, in_logits_dtype)
    return empty_gradients((hidden, weight, bias), logps, needs)


def _save_for_backward(ctx, inputs, output) -> None:
    (hidden, weight, bias, _, action_ids, mask, inverse_temperature, logit_scale, softcap, *knobs,
     with_entropy, _, backend, chunk_bytes, _, group, ranks, whole, trains) = inputs  # fmt: skip
    logps, entropies, peak, log_sum, statistics, bad_values, hidden_wanted = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(peak, log_sum, statistics, bad_values, hidden_wanted)
    ctx.save_for_backward(
        mask, hidden, weight, bias, action_ids, inverse_temperature, logit_scale, softcap,
        logps, entropies, peak, log_sum, hidden_wanted,
    )  # fmt: skip
    ctx.with_entropy = with_entropy
    ctx.whole_hidden_grad = whole
    ctx.knobs = (*knobs, backend, chunk_bytes, group, ranks, whole, trains)


def _backward(ctx, grad_logps, grad_entropies, *_):
    # Where the parts are added up no rank may return early for itself: the others would wait.
    needs = ctx.needs_input_grad[:3]
    mask, *saved = ctx.saved_tensors
    grad_entropies = grad_entropies if ctx.with_entropy else None
    idle = not any(needs) and not ctx.whole_hidden_grad
    if (grad_logps is None and grad_entropies is None) or idle:
        return (None,) * 20
    gradients = sharded_logprob_backward_op(
        *saved,
        of_active_rows(grad_logps, mask),
        of_active_rows(grad_entropies, mask),
        *ctx.knobs,
        *needs,
        False,
    )
    of_leaves = (g if need else None for g, need in zip(gradients, needs, strict=True))
    of_anchor = anchor_grad(gradients[0]) if ctx.needs_input_grad[3] else None
    return *of_leaves, of_anchor, *(None,) * 16


differentiable(sharded_scores_op, _backward, _save_for_backward)
differentiable(sharded_logprob_backward_op, refuse_double_backward)

"""The two passes over flat rows: options resolved, then one operator call each."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..config import check_choice, check_positive_int, check_real_option
from ..distributed.shared_sum import ANCHOR
from .backends import check_backend
from .contract import DEFAULT_CHUNK_BYTES, Gradients, Needs, Want
from .operators import linear_logprob_backward_op, linear_scores_op, of_active_rows
from .sharded_operators import sharded_logprob_backward_op, sharded_scores_op
from .sharding import Sharding


@dataclass(frozen=True)
class Execution:
    """How to compute: never changes a result beyond rounding."""

    backend: Literal["torch", "triton"] | None = None
    """None picks Triton where it can run and torch elsewhere; a named backend never falls back."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Budget of all temporaries of a pass together, in bytes; honoured down to one tile."""
    validate: Literal["eager"] | None = None
    """"eager" raises for bad values on an accelerator at once, for one synchronisation; None
    raises at the next read of the host."""

    def __post_init__(self) -> None:
        check_backend(self.backend)
        check_choice("validate", self.validate, ("eager",), or_none=True)
        check_positive_int("chunk_bytes", self.chunk_bytes)


class LogitModifiers(NamedTuple):
    """What happens to hidden @ weight.T + bias before the softmax."""

    temperature: float | Tensor = 1.0
    """A number, or a tensor with one entry a row."""
    logit_scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None


class HeadRows(NamedTuple):
    """Rows of hidden states under an lm_head, and the actions to score; shapes are checked."""

    hidden: Tensor
    """[N, H]."""
    weight: Tensor
    """[V, H]."""
    bias: Tensor | None
    """[V]."""
    action_ids: Tensor
    """[N] int."""
    mask: Tensor | None
    """[N] bool; None: all rows are active."""
    modifiers: LogitModifiers
    execution: Execution
    checks: Literal["defer"] | None = None
    """"defer" leaves the counts of bad values to the caller; None follows execution.validate."""
    sharding: Sharding | None = None
    """weight and bias are this rank's rows of a head; None: they are the head."""

    @property
    def anchor(self) -> Tensor | None:
        """What makes backward run on a rank that trains nothing but has a part to add."""
        leaves = (self.hidden, self.weight, self.bias)
        trains = any(leaf is not None and leaf.requires_grad for leaf in leaves)
        adds = self.sharding is not None and self.sharding.whole_hidden_grad
        return ANCHOR if adds and not trains and torch.is_grad_enabled() else None


class RowScores(NamedTuple):
    """Pass 1 over flat rows: as contract.Scores, but for the last two fields."""

    logps: Tensor
    entropies: Tensor
    max: Tensor
    log_sum: Tensor
    statistics: Tensor
    bad_values: Tensor
    """int64 [1] or [2]: active rows with an id out of range, and with a bad temperature; for checks
    = "defer" alone, else [0] or not to be read."""
    hidden_wanted: Tensor | None = None
    """Of a sharded head, 0-d bool: hidden requires a gradient on some rank."""


def pass_one(rows: HeadRows, want: Want) -> RowScores:
    """Log-probabilities and what else is wanted; logps and entropies are differentiable."""
    inputs = _head_inputs(rows)
    leaves = (rows.hidden, rows.weight, rows.bias)
    arguments = (
        rows.action_ids,
        rows.mask,
        inputs.inverse_temperature,
        inputs.logit_scale,
        inputs.softcap,
        inputs.vocab_size,
        inputs.compute_dtype,
        *want,
        rows.execution.backend or "",
        rows.execution.chunk_bytes,
        rows.checks or ("eager" if rows.execution.validate == "eager" else "later"),
    )
    if rows.sharding is None:
        return RowScores(*linear_scores_op(*leaves, *arguments))
    return RowScores(*sharded_scores_op(*leaves, rows.anchor, *arguments, *_sharding(rows)))


def pass_two(
    rows: HeadRows,
    scores: RowScores,
    grad_logps: Tensor | None,
    grad_entropies: Tensor | None,
    needs: Needs,
) -> Gradients:
    """Gradients of hidden, weight and bias, for callers who run pass 2 themselves."""
    inputs = _head_inputs(rows)
    saved = (
        rows.hidden,
        rows.weight,
        rows.bias,
        rows.action_ids,
        inputs.inverse_temperature,
        inputs.logit_scale,
        inputs.softcap,
        scores.logps,
        scores.entropies,
        scores.max,
        scores.log_sum,
    )
    arguments = (
        of_active_rows(grad_logps, rows.mask),
        of_active_rows(grad_entropies, rows.mask),
        inputs.vocab_size,
        inputs.compute_dtype,
        rows.execution.backend or "",
        rows.execution.chunk_bytes,
    )
    if scores.hidden_wanted is None:
        gradients = linear_logprob_backward_op(*saved, *arguments, *needs)
    else:
        gradients = sharded_logprob_backward_op(
            *saved, scores.hidden_wanted, *arguments, *_sharding(rows), *needs
        )
    wanted = (needs.hidden, needs.weight, needs.bias)
    return Gradients(*(g if want else None for g, want in zip(gradients, wanted, strict=True)))


def _sharding(rows: HeadRows) -> tuple[str, int, bool, bool]:
    """What the operators are told of the ranks, and they of this one: whether hidden trains."""
    assert rows.sharding is not None
    group = rows.sharding.group
    trains = rows.hidden.requires_grad
    return group.name, group.size, rows.sharding.whole_hidden_grad, trains


class _HeadInputs(NamedTuple):
    """What the operators take beside the leaves, resolved from modifiers and execution."""

    inverse_temperature: Tensor | None
    logit_scale: Tensor | None
    softcap: Tensor | None
    vocab_size: int
    compute_dtype: torch.dtype


def _head_inputs(rows: HeadRows) -> _HeadInputs:
    """Resolve dtypes and modifiers for the operators; floats become tensors, 1 and off None."""
    hidden, weight, modifiers = rows.hidden, rows.weight, rows.modifiers
    compute_dtype = _compute_dtype(hidden, weight)
    logits_dtype = logits_dtype_of(hidden, weight)
    scalar = partial(_scalar, dtype=logits_dtype, device=hidden.device)
    temperature: Tensor | None
    if isinstance(modifiers.temperature, Tensor):
        temperature = modifiers.temperature.detach().to(logits_dtype)
    else:
        temperature = scalar("temperature", modifiers.temperature, neutral=1)
    return _HeadInputs(
        inverse_temperature=None if temperature is None else temperature.reciprocal(),
        logit_scale=scalar("logit_scale", modifiers.logit_scale, neutral=1),
        softcap=scalar("softcap", modifiers.softcap, neutral=None),
        vocab_size=_vocab_size(modifiers.vocab_size, weight.shape[0], rows.sharding),
        compute_dtype=compute_dtype,
    )


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The active autocast's dtype, else the promoted one, which never rounds an fp32 head."""
    promoted = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if promoted != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return promoted


def logits_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """dtype of logits, logps and entropies: float64 if an input is, else float32."""
    double = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if double else torch.float32


def _scalar(
    name: str,
    value: float | None,
    *,
    neutral: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """An option as a 0-d tensor; None for its neutral value, which costs nothing.

    Multiplied and not filled in: a fill would make the compiler specialise on the value.
    """
    if type(value) in (type(None), float, int) and value == neutral:
        return None
    number, limits = check_real_option(name, value), torch.finfo(dtype)
    if not limits.tiny <= number <= limits.max:
        raise ValueError(
            f"{name} must lie in the range of the logits' {dtype}, {limits.tiny:.3g} to "
            f"{limits.max:.3g}; got {value!r}"
        )
    return None if number == neutral else torch.ones((), dtype=dtype, device=device) * number


def _vocab_size(vocab_size: int | None, rows: int, sharding: Sharding | None) -> int:
    if vocab_size is None and sharding is not None:
        raise ValueError(
            "vocab_size must be given with tp_group: the rows of the whole head without padding; "
            "got None"
        )
    if vocab_size is None:
        return rows
    check_positive_int("vocab_size", vocab_size)
    if vocab_size > rows and sharding is None:
        raise ValueError(
            f"vocab_size must be at most the number of rows of weight, {rows}; got {vocab_size}"
        )
    return vocab_size

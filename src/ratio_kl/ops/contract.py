"""What the operators and their backends say to each other. No computation here.

A backend is two functions over flat rows (N tokens), each with the signature below:

    forward(head, action_ids, mask, *, want, bad_ids=None) -> Scores
    backward(head, saved, grad_logps, grad_entropies, *, needs, hidden_done=None) -> Gradients

bad_ids, where it is given, is the tensor that Scores.bad_ids is to be: 0-d, in memory of the host
that the device can write to.

hidden_done, where it is given, makes the gradient of hidden one of the logits' dtype, and is called
with it as soon as it is complete, before the last product for the weight (or not at all, where no
row has a coefficient): its sum over ranks then runs beside that product.

The modified logits of row n are, in this order,

    x = hidden @ weight.T + bias;  x = x * logit_scale;  x = softcap * tanh(x / softcap)
    z = x * inverse_temperature                        columns >= vocab_size left out

An absent modifier is None, and None costs nothing: kernel flags follow from it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

HiddenDone = Callable[[Tensor], None]
"""Takes the complete gradient of hidden, [N, H] in the logits' dtype."""

DEFAULT_CHUNK_BYTES = 128 * 1024 * 1024
"""Budget of all temporaries of a pass together, in bytes. Twice as much gains 0 to 3 % of the time
on an H200 (the most at 32,768 tokens), half as much costs 1 to 7 %."""


@dataclass(frozen=True)
class Head:
    """An lm_head applied to N rows of hidden states, and how to compute it."""

    hidden: Tensor
    """[N, H], any floating dtype, any strides."""
    weight: Tensor
    """[V, H], any floating dtype, any strides."""
    bias: Tensor | None
    """[V] or None."""
    inverse_temperature: Tensor | None
    """0-d or [N], in the logits' dtype; None means 1."""
    logit_scale: Tensor | None
    """0-d, in the logits' dtype; None means 1."""
    softcap: Tensor | None
    """0-d, in the logits' dtype; None means off."""
    vocab_size: int
    """Columns >= vocab_size are left out; at most V."""
    compute_dtype: torch.dtype
    """dtype to which hidden and weight are converted before they are multiplied."""
    chunk_bytes: int
    """Budget of all temporaries together; honoured down to one tile."""

    @property
    def logits_dtype(self) -> torch.dtype:
        """float64 for float64 computation, else float32: logits are never rounded below it."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    @cached_property
    def layout(self) -> Hashable:
        """All of it but what lies in the tensors, and where they lie."""
        tensors = (
            self.hidden,
            self.weight,
            self.bias,
            self.inverse_temperature,
            self.logit_scale,
            self.softcap,
        )
        return (
            self.vocab_size,
            self.compute_dtype,
            self.chunk_bytes,
            self.hidden.device,
            *[None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors],
        )


class Want(NamedTuple):
    """What pass 1 is asked for beside logps; what is not asked for costs nothing."""

    entropy: bool
    statistics: bool = False


class Scores(NamedTuple):
    """Result of pass 1, every field [N] in the logits' dtype and exactly 0 on inactive rows."""

    logps: Tensor
    """min(0, (z[id] - max) - log_sum); NaN where an active row's id is out of range."""
    entropies: Tensor
    """-sum p log p >= 0; size 0 if not asked for."""
    max: Tensor
    """max(z). Kept apart from log_sum: one lse loses digits when all logits share an offset."""
    log_sum: Tensor
    """log(sum(exp(z - max)))."""
    bad_ids: Tensor
    """0-d int64: number of active rows whose id is outside [0, vocab_size). Their logp is NaN."""
    statistics: Tensor
    """[3, N]: log sum p^2, mean of z, and 1 where the id is the first at which z is largest, else
    0; [3, 0] if not asked for."""


class Saved(NamedTuple):
    """What pass 2 needs of pass 1, beside the inputs."""

    action_ids: Tensor
    """[N] int."""
    logps: Tensor
    max: Tensor
    log_sum: Tensor
    entropies: Tensor
    """[N] each, as Scores; entropies of size 0 if not asked for."""


class Needs(NamedTuple):
    """Which gradients are asked for; what is not asked for costs nothing."""

    hidden: bool
    weight: bool
    bias: bool
    in_logits_dtype: bool = False
    """Gradients in the logits' dtype, not the leaves': to be scaled before they are rounded."""


class Gradients(NamedTuple):
    """Result of pass 2: each in its leaf's shape, None where not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LogitsScores(NamedTuple):
    """Ratio and KL from logits that the caller holds; each of action_ids' shape, float32 or 64."""

    ratio: Tensor
    """exp(logp - old_logps); 1 on inactive rows."""
    kl: Tensor
    """exp(delta) - delta - 1; 0 on inactive rows."""
    max: Tensor
    log_sum: Tensor
    """Of the policy's logits, as in Scores; 0 on inactive rows."""
    delta: Tensor
    """ref_logp - logp; 0 on inactive rows."""
    bad_ids: Tensor
    """0-d int64: number of active rows whose id is outside [0, V)."""


class LogitsSaved(NamedTuple):
    """What the backward of `ratio_kl` needs beside the policy's logits and ids."""

    ratio: Tensor
    delta: Tensor
    max: Tensor
    log_sum: Tensor

"""Log-probabilities and entropies of an lm_head, from hidden states and without logits."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import (
    check_device,
    check_head,
    check_integer,
    check_real,
    check_shape,
    declared_vocab_size,
)
from ..config import check_bool
from ..field_docs import with_field_docs
from .contract import DEFAULT_CHUNK_BYTES, Want
from .passes import Execution, HeadRows, LogitModifiers, pass_one
from .sharding import sharding_of


@with_field_docs
class LogProbs(NamedTuple):
    """What pass 1 says of each token; float32, or float64 for float64 inputs."""

    logps: Tensor
    """log-probability of the action, shape of action_ids; 0 on inactive tokens."""
    entropies: Tensor
    """Entropy in nats, shape of action_ids; 0 on inactive tokens. Size 0 if not asked for."""
    log_sum_sq_probs: Tensor
    """log sum p^2 over the vocabulary (minus the collision entropy), shape of action_ids."""
    mean_logits: Tensor
    """Mean over the vocabulary of the modified logits, shape of action_ids."""
    is_top1: Tensor
    """bool, shape of action_ids: the action is the first of the most probable tokens.

    These three carry no gradient, are 0 or False on inactive tokens, and have size 0 if not asked
    for."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    action_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    return_statistics: bool = False,
    validate: Literal["eager"] | None = None,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    tp_group: object = None,
    tp_hidden_grad: Literal["whole", "part"] = "whole",
) -> LogProbs:
    """Log-probability of each action, and the entropy, under softmax(hidden @ weight.T).

    Differentiable in hidden, weight and bias. Logits exist only tile by tile; inactive tokens are
    not computed, and neither are, in backward, tokens whose incoming gradients are both zero.

        x = hidden @ weight.T + bias;  x = x * logit_scale;  x = softcap * tanh(x / softcap)
        logps = log_softmax(x / temperature)[action_ids];  entropies = -sum p log p

    Args:
        hidden: [B, T, H] or [N, H], float64, float32, bfloat16 or float16. Already shifted: row t
            predicts action_ids at t.
        weight: [V, H], any of these dtypes, as lm_head.weight.
        action_ids: [B, T] or [N], int. Any value on inactive tokens.
        attention_mask: like action_ids, bool, int or float; non-zero marks active tokens. None:
            all are active.
        bias: [V] or None.
        temperature: > 0; a float, or a tensor with one entry a sequence ([B], [B, 1]) or one a
            token (like action_ids).
        logit_scale: > 0, factor on the logits before the softcap.
        softcap: > 0 or None.
        vocab_size: rows of the weight from vocab_size on are padding and left out; None: V.
        return_entropy: compute entropies too.
        return_statistics: compute log_sum_sq_probs, mean_logits and is_top1 too.
        validate: "eager" raises for out-of-range ids on an accelerator at once (one
            synchronisation); None raises in this call's backward or in a later call. On the CPU
            both raise at once.
        backend: "torch", "triton", or None for the fastest that can run here.
        chunk_bytes: budget of all temporaries of a pass together, in bytes.
        tp_group: ProcessGroup over which the head is cut by rows (vocabulary-parallel). weight and
            bias are then this rank's rows in the order of the ranks, as many as there are, or a
            DTensor with placement Shard(0) on the group's mesh; everything else is the same on
            every rank, action_ids and vocab_size, which must be given, count the whole head, and
            only the last rank's rows may end in padding. None, or a group of one rank: whole.
        tp_hidden_grad: "whole" adds the gradient of hidden up over tp_group; "part" leaves each
            rank its own part, for callers who add them up themselves.

    Returns:
        LogProbs, each field of action_ids' shape, float32 (float64 for float64 inputs; is_top1
        bool), exactly 0 on inactive tokens; of size 0 what was not asked for.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; an option or, on the CPU, an id of an
            active token is out of range; the requested backend cannot run here; the rows of all
            ranks of tp_group do not make up vocab_size.
        TypeError: an argument has the wrong Python type.
    """
    check_bool("return_entropy", return_entropy)
    check_bool("return_statistics", return_statistics)
    sharding = sharding_of(tp_group, tp_hidden_grad)
    vocab_size = declared_vocab_size(vocab_size, weight)
    hidden, weight, bias = check_head(hidden, weight, bias, tp_group=tp_group)
    ids = check_integer("action_ids", action_ids)
    shape = hidden.shape[:-1]
    check_shape("action_ids", ids, (tuple(shape), "hidden.shape[:-1]"))
    check_device("action_ids", ids, hidden.device)
    mask = None
    if attention_mask is not None:
        mask = check_real("attention_mask", attention_mask)
        check_shape("attention_mask", mask, (tuple(shape), "action_ids.shape"))
        check_device("attention_mask", mask, hidden.device)
        mask = _flat(mask if mask.dtype == torch.bool else mask != 0)
    if isinstance(temperature, Tensor):
        temperature = _row_temperature(temperature, shape, hidden.device)
    rows = HeadRows(
        hidden=hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        action_ids=_flat(ids),
        mask=mask,
        modifiers=LogitModifiers(temperature, logit_scale, softcap, vocab_size),
        execution=Execution(backend, chunk_bytes, validate),
        sharding=sharding,
    )
    logps, entropies, _, _, statistics, *_ = pass_one(rows, Want(return_entropy, return_statistics))
    if len(shape) > 1:
        logps = logps.view(shape)
        entropies = entropies.view(shape) if return_entropy else entropies
    if return_statistics:
        log_sum_sq, mean, top1 = statistics.reshape(3, *shape)
        return LogProbs(logps, entropies, log_sum_sq, mean, top1 != 0)
    nothing = statistics.reshape(-1)
    return LogProbs(logps, entropies, nothing, nothing, nothing.bool())


def _flat(tensor: Tensor) -> Tensor:
    """One entry a row."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _row_temperature(temperature: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """A tensor temperature as one entry a row, [N]."""
    temperature = check_real("temperature", temperature)
    check_device("temperature", temperature, device)
    expected = [(tuple(shape), "action_ids.shape"), ((), "[]")]
    if len(shape) == 2:
        expected += [((shape[0],), "[B]"), ((shape[0], 1), "[B, 1]")]
    check_shape("temperature", temperature, *expected)
    if 0 < temperature.dim() < len(shape):
        temperature = temperature[:, None]
    return temperature.expand(shape).reshape(-1)

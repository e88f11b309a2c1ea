"""Log-probabilities and entropies of an lm_head, from hidden states and without logits."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
from ..config import check_positive_int, check_real_option
from .contract import DEFAULT_CHUNK_BYTES
from .operators import BACKENDS, linear_logprob_op


class LogProbs(NamedTuple):
    """What pass 1 says of each token; float32, or float64 for float64 inputs."""

    logps: Tensor
    """log-probability of the action, shape of action_ids; 0 on inactive tokens."""
    entropies: Tensor
    """Entropy in nats, shape of action_ids; 0 on inactive tokens. Size 0 if not asked for."""


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
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(BACKENDS)} or None; got {self.backend!r}"
            )
        if self.validate not in (None, "eager"):
            raise ValueError(f"validate must be 'eager' or None; got {self.validate!r}")
        check_positive_int("chunk_bytes", self.chunk_bytes)


@dataclass(frozen=True)
class LogitModifiers:
    """What happens to hidden @ weight.T + bias before the softmax."""

    temperature: float | Tensor = 1.0
    """A number, or a tensor that is 0-d or has one entry a row."""
    logit_scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None


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
    validate: Literal["eager"] | None = None,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
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
        validate: "eager" raises for out-of-range ids on an accelerator at once (one
            synchronisation); None raises in this call's backward or in a later call. On the CPU
            both raise at once.
        backend: "torch", "triton", or None for the fastest that can run here.
        chunk_bytes: budget of all temporaries of a pass together, in bytes.

    Returns:
        LogProbs(logps, entropies), each of action_ids' shape, float32 (float64 for float64
        inputs), exactly 0 on inactive tokens; entropies has size 0 unless asked for.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; an option or, on the CPU, an id of an
            active token is out of range; the requested backend cannot run here.
        TypeError: an argument has the wrong Python type.
    """
    hidden, weight, bias = check_head(hidden, weight, bias)
    ids = check_integer("action_ids", action_ids)
    shape = hidden.shape[:-1]
    check_shape("action_ids", ids, (tuple(shape), "hidden.shape[:-1]"))
    check_device("action_ids", ids, hidden.device)
    mask = None
    if attention_mask is not None:
        mask = check_real("attention_mask", attention_mask)
        check_shape("attention_mask", mask, (tuple(shape), "action_ids.shape"))
        check_device("attention_mask", mask, hidden.device)
        mask = (mask != 0).reshape(-1)
    if isinstance(temperature, Tensor):
        temperature = _row_temperature(temperature, shape, hidden.device)
    scores = score(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        ids.reshape(-1),
        mask,
        LogitModifiers(temperature, logit_scale, softcap, vocab_size),
        Execution(backend, chunk_bytes, validate),
        with_entropy=return_entropy,
    )
    entropies = scores.entropies.reshape(shape) if return_entropy else scores.entropies
    return LogProbs(scores.logps.reshape(shape), entropies)


class FlatScores(NamedTuple):
    """Pass 1 over flat rows, with what pass 2 needs of it: the operator's outputs."""

    logps: Tensor
    entropies: Tensor
    max: Tensor
    log_sum: Tensor
    bad_ids: Tensor


def score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    action_ids: Tensor,
    mask: Tensor | None,
    modifiers: LogitModifiers,
    execution: Execution,
    *,
    with_entropy: bool,
) -> FlatScores:
    """Pass 1 on flat rows ([N, H] hidden, [N] ids and bool mask) whose shapes are checked."""
    inputs = head_inputs(hidden, weight, modifiers, execution)
    return FlatScores(
        *linear_logprob_op(
            hidden,
            weight,
            bias,
            action_ids,
            mask,
            inputs.inverse_temperature,
            inputs.logit_scale,
            inputs.softcap,
            inputs.vocab_size,
            inputs.compute_dtype,
            with_entropy,
            inputs.backend,
            execution.chunk_bytes,
            execution.validate == "eager",
        )
    )


class HeadInputs(NamedTuple):
    """What the operators take beside the leaves, resolved from modifiers and execution."""

    inverse_temperature: Tensor | None
    logit_scale: Tensor | None
    softcap: Tensor | None
    vocab_size: int
    compute_dtype: torch.dtype
    backend: str


def head_inputs(
    hidden: Tensor, weight: Tensor, modifiers: LogitModifiers, execution: Execution
) -> HeadInputs:
    """Resolve dtypes and modifiers for the operators; floats become tensors, 1 and off None."""
    compute_dtype = _compute_dtype(hidden, weight)
    logits_dtype = logits_dtype_of(hidden, weight)
    one = torch.ones((), dtype=logits_dtype, device=hidden.device)
    temperature = modifiers.temperature
    if isinstance(temperature, Tensor):
        inverse_temperature = temperature.detach().to(logits_dtype).reciprocal()
    elif (scalar := _scalar("temperature", temperature, one)) is not None:
        inverse_temperature = scalar.reciprocal()
    else:
        inverse_temperature = None
    if modifiers.softcap is not None:
        check_real_option("softcap", modifiers.softcap)
    return HeadInputs(
        inverse_temperature=inverse_temperature,
        logit_scale=_scalar("logit_scale", modifiers.logit_scale, one),
        softcap=None if modifiers.softcap is None else one * modifiers.softcap,
        vocab_size=_vocab_size(modifiers.vocab_size, weight.shape[0]),
        compute_dtype=compute_dtype,
        backend=execution.backend or "",
    )


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The active autocast's dtype, else the promoted one: an fp32 head is never rounded silently."""
    promoted = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if promoted != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return promoted


def logits_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """dtype of logits, logps and entropies: float64 if an input is, else float32."""
    double = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if double else torch.float32


def _scalar(name: str, value: float, one: Tensor) -> Tensor | None:
    """A factor as a 0-d tensor; None for 1, which costs nothing."""
    check_real_option(name, value)
    return None if value == 1 else one * value


def _vocab_size(vocab_size: int | None, rows: int) -> int:
    if vocab_size is None:
        return rows
    check_positive_int("vocab_size", vocab_size)
    if vocab_size > rows:
        raise ValueError(
            f"vocab_size must be at most the number of rows of weight, {rows}; got {vocab_size}"
        )
    return vocab_size


def _row_temperature(temperature: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """A tensor temperature as 0-d or one entry a row, [N]."""
    temperature = check_floating("temperature", temperature)
    check_device("temperature", temperature, device)
    if temperature.dim() == 0:
        return temperature
    expected = [(tuple(shape), "action_ids.shape")]
    if len(shape) == 2:
        expected += [((shape[0],), "[B]"), ((shape[0], 1), "[B, 1]")]
    check_shape("temperature", temperature, *expected)
    if temperature.dim() < len(shape):
        temperature = temperature[:, None]
    return temperature.expand(shape).reshape(-1)

"""The whole loss: pass 1, then the surrogate on per-token tensors; autograd runs pass 2."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import check_head, check_shape
from ..config import RatioKLConfig, check_positive_int, check_real_option
from ..distributed.groups import resolve
from ..ops.linear_logprob import Execution, LogitModifiers, logits_dtype_of, score
from .inputs import Tokens, read_items, read_tokens
from .surrogate import LossOutput, Step, surrogate_loss


class Call(NamedTuple):
    """The arguments of one call, as the caller gave them (FusedLinearRatioKLLoss.forward)."""

    hidden: Tensor
    weight: Tensor
    action_ids: Tensor
    attention_mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    ref_hidden: Tensor | None
    ref_weight: Tensor | None
    ref_bias: Tensor | None
    bias: Tensor | None
    sampling_ratio: Tensor | None
    sampling_logps: Tensor | None
    num_items_in_batch: Tensor | float | None
    gradient_accumulation_steps: int
    temperature: float | Tensor | None
    entropy_coef: float | Tensor | None
    cu_seqlens: Tensor | None


def linear_policy_loss(
    call: Call, config: RatioKLConfig, execution: Execution, process_group: object
) -> LossOutput:
    """Loss, metrics and per-token outputs of a call; everything is checked before it is used."""
    hidden, weight, bias = check_head(call.hidden, call.weight, call.bias)
    tokens = read_tokens(
        hidden,
        logits_dtype_of(hidden, weight),
        action_ids=call.action_ids,
        attention_mask=call.attention_mask,
        advantages=call.advantages,
        old_logps=call.old_logps,
        ref_logps=call.ref_logps,
        sampling_logps=call.sampling_logps,
        sampling_ratio=call.sampling_ratio,
        temperature=call.temperature,
        cu_seqlens=call.cu_seqlens,
    )
    reference = _reference_head(call, weight, bias, config)
    step = _step(call, config, process_group)
    modifiers = _modifiers(call, tokens, config)
    if reference is not None:
        tokens = replace(
            tokens, ref_logps=_score_reference(reference, tokens, modifiers, execution)
        )
    scores = score(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        tokens.action_ids.reshape(-1),
        tokens.mask.reshape(-1),
        modifiers,
        execution,
        with_entropy=True,
    )
    shape = tokens.layout.shape
    return surrogate_loss(
        scores.logps.reshape(shape), scores.entropies.reshape(shape), tokens, config, step
    )


class _Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def _reference_head(
    call: Call, weight: Tensor, bias: Tensor | None, config: RatioKLConfig
) -> _Head | None:
    """The head to score the reference with, or None where its logps came or are not needed."""
    given = call.ref_logps is not None, call.ref_hidden is not None
    if all(given):
        raise ValueError("the reference came twice: pass either ref_logps or ref_hidden, not both")
    if config.beta == 0:
        return None
    if not any(given):
        raise ValueError(
            f"beta={config.beta!r} needs a reference: pass ref_logps, or ref_hidden with "
            "ref_weight and ref_bias (which default to weight and bias); got neither"
        )
    if call.ref_hidden is None:
        return None
    own_weight = call.ref_weight is None
    ref_bias = bias if own_weight and call.ref_bias is None else call.ref_bias
    head = _Head(
        *check_head(
            call.ref_hidden, weight if own_weight else call.ref_weight, ref_bias, prefix="ref_"
        )
    )
    outer = tuple(call.hidden.shape[:-1])
    check_shape("ref_hidden", head.hidden[..., 0], (outer, "hidden.shape[:-1]"))
    return head


def _score_reference(
    head: _Head, tokens: Tokens, modifiers: LogitModifiers, execution: Execution
) -> Tensor:
    with torch.no_grad():
        scores = score(
            head.hidden.reshape(-1, head.hidden.shape[-1]),
            head.weight,
            head.bias,
            tokens.action_ids.reshape(-1),
            tokens.mask.reshape(-1),
            modifiers,
            execution,
            with_entropy=False,
        )
    return scores.logps.to(tokens.advantages.dtype).reshape(tokens.layout.shape)


def _modifiers(call: Call, tokens: Tokens, config: RatioKLConfig) -> LogitModifiers:
    temperature: float | Tensor
    if tokens.row_temperature is not None:
        temperature = tokens.row_temperature.reshape(-1)
    elif call.temperature is not None:
        check_real_option("temperature", call.temperature)
        temperature = call.temperature
    else:
        temperature = config.temperature
    return LogitModifiers(temperature, config.logit_scale, config.softcap, config.vocab_size)


def _step(call: Call, config: RatioKLConfig, process_group: object) -> Step:
    check_positive_int("gradient_accumulation_steps", call.gradient_accumulation_steps)
    entropy_coef = config.entropy_coef if call.entropy_coef is None else call.entropy_coef
    if isinstance(entropy_coef, Tensor):
        if entropy_coef.numel() != 1:
            raise ValueError(
                f"entropy_coef must have one element; got shape {list(entropy_coef.shape)}"
            )
        entropy_coef = entropy_coef.detach().reshape(()).to(call.hidden.device)
    else:
        check_real_option("entropy_coef", entropy_coef)
    return Step(
        num_items=read_items(call.num_items_in_batch, call.hidden.device),
        accumulation_steps=call.gradient_accumulation_steps,
        entropy_coef=entropy_coef,
        group=resolve(process_group),
    )

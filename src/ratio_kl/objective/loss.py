"""The whole loss: pass 1, then the surrogate on per-token tensors; autograd runs pass 2."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..checks.arguments import (
    check_device,
    check_floating,
    check_head,
    check_scalar,
    check_shape,
    declared_vocab_size,
)
from ..config import RatioKLConfig, check_choice, check_positive_int, check_real_option
from ..distributed.groups import Group, check_crossing, resolve, resolve_cut
from ..ops.contract import Want
from ..ops.passes import (
    Execution,
    HeadRows,
    LogitModifiers,
    RowScores,
    logits_dtype_of,
    pass_one,
)
from ..ops.sharding import check_hidden_grad, sharding_of
from .exchange import communicates, exchange
from .inputs import Tokens, read_items, read_tokens
from .stash import loss_with_stashed_gradients
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


@dataclass(frozen=True)
class Runtime:
    """How and where a call is computed; only the groups can change a result."""

    execution: Execution
    grads: Literal["backward", "forward"]
    process_group: object
    tp_group: object = None
    tp_hidden_grad: Literal["whole", "part"] = "whole"
    cp_group: object = None

    def __post_init__(self) -> None:
        check_choice("grads", self.grads, ("backward", "forward"))
        resolve(self.process_group)
        check_hidden_grad(self.tp_hidden_grad)
        cuts = {"tp_group": self.tp_group, "cp_group": self.cp_group}
        for name, group in cuts.items():
            resolve_cut(group, name=name)
            if group is not None and self.process_group is None:
                raise ValueError(
                    f"process_group must be named with {name}: the ranks that hold other "
                    "sequences, or 'local'; got None, the default group, in which ranks that "
                    "share sequences would count as if they held others"
                )
        check_crossing(process_group=self.process_group, **cuts)

    def __deepcopy__(self, memo: dict[int, object]) -> "Runtime":
        """Itself, for it never changes: a copied model belongs to the same groups."""
        return self


def linear_policy_loss(call: Call, config: RatioKLConfig, runtime: Runtime) -> LossOutput:
    """Loss, metrics and per-token outputs of a call; everything is checked before it is used."""
    sharding = sharding_of(runtime.tp_group, runtime.tp_hidden_grad)
    vocab_size = declared_vocab_size(config.vocab_size, call.weight)
    hidden, weight, bias = check_head(
        call.hidden, call.weight, call.bias, tp_group=runtime.tp_group
    )
    group, cp_group = resolve(runtime.process_group), resolve_cut(runtime.cp_group, name="cp_group")
    together = communicates(config, call.num_items_in_batch, group, cp_group)
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
        checks="defer" if together else "later",
        cp_group=cp_group,
    )
    step = _step(call, tokens, config, group)
    rows = HeadRows(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        action_ids=tokens.action_ids.reshape(-1),
        mask=tokens.mask.reshape(-1),
        modifiers=_modifiers(call, tokens, config, vocab_size),
        execution=runtime.execution,
        checks="defer" if together else None,
        sharding=sharding,
    )
    reference = _score_reference(_reference_rows(call, rows, config, runtime.tp_group))

    def surrogate(scores: RowScores) -> LossOutput:
        count = None
        if together:
            passes = [scores] if reference is None else [scores, reference]
            bad_values = [done.bad_values for done in passes]
            checks = runtime.execution.validate or "later"
            count = exchange(tokens, bad_values, vocab_size or weight.shape[0], group, checks)
        return surrogate_loss(
            scores.logps.reshape(tokens.layout.shape),
            scores.entropies.reshape(tokens.layout.shape),
            _with_reference(tokens, reference),
            config,
            replace(step, exchanged=count),
        )

    trains = any(leaf is not None and leaf.requires_grad for leaf in (hidden, weight, bias))
    # Ranks that cut a head or sequences go the same way, whether or not each of them trains.
    trains = trains or sharding is not None or cp_group is not None
    if runtime.grads == "forward" and trains and _records_gradients():
        return loss_with_stashed_gradients(rows, surrogate)
    return surrogate(pass_one(rows, Want(entropy=True)))


def _records_gradients() -> bool:
    """Grad mode alone does not say so: in inference mode, of which torch.compile does not know, it
    may be on, and nothing is recorded."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _score_reference(rows: HeadRows | None) -> RowScores | None:
    if rows is None:
        return None
    with torch.no_grad():
        return pass_one(rows, Want(entropy=False))


def _with_reference(tokens: Tokens, reference: RowScores | None) -> Tokens:
    if reference is None:
        return tokens
    logps = reference.logps.to(tokens.advantages.dtype).reshape(tokens.layout.shape)
    return replace(tokens, ref_logps=logps)


def _reference_rows(
    call: Call, rows: HeadRows, config: RatioKLConfig, tp_group: object
) -> HeadRows | None:
    """The rows to score the reference on, or None where its logps came or are not needed."""
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
    ref_hidden = check_floating("ref_hidden", call.ref_hidden)
    check_device("ref_hidden", ref_hidden, call.hidden.device)
    hidden, weight, bias = check_head(
        ref_hidden,
        call.weight if call.ref_weight is None else call.ref_weight,
        call.bias if call.ref_bias is None else call.ref_bias,
        prefix="ref_",
        tp_group=tp_group,
    )
    outer = tuple(call.hidden.shape[:-1])
    check_shape("ref_hidden", hidden[..., 0], (outer, "hidden.shape[:-1]"))
    # Field by field: torch 2.8 traces neither _replace nor a slice of a named tuple.
    return HeadRows(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows.action_ids, rows.mask,
        rows.modifiers, rows.execution, rows.checks, rows.sharding,
    )  # fmt: skip


def _modifiers(
    call: Call, tokens: Tokens, config: RatioKLConfig, vocab_size: int | None
) -> LogitModifiers:
    temperature: float | Tensor
    if tokens.temperature is not None:
        temperature = tokens.temperature.reshape(-1)
    elif call.temperature is not None:
        temperature = check_real_option("temperature", call.temperature)
    else:
        temperature = config.temperature
    return LogitModifiers(temperature, config.logit_scale, config.softcap, vocab_size)


def _step(call: Call, tokens: Tokens, config: RatioKLConfig, group: Group | None) -> Step:
    check_positive_int("gradient_accumulation_steps", call.gradient_accumulation_steps)
    entropy_coef = config.entropy_coef if call.entropy_coef is None else call.entropy_coef
    if isinstance(entropy_coef, Tensor):
        like = tokens.advantages
        entropy_coef = check_scalar("entropy_coef", entropy_coef).to(like.device, like.dtype)
    else:
        entropy_coef = check_real_option("entropy_coef", entropy_coef)
    return Step(
        num_items=read_items(call.num_items_in_batch, call.hidden.device),
        accumulation_steps=call.gradient_accumulation_steps,
        entropy_coef=entropy_coef,
        group=group,
        exchanged=None,
    )

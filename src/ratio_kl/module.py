"""FusedLinearRatioKLLoss: holds a config, forwards once."""

import difflib
from dataclasses import fields
from typing import Any, Literal

from torch import Tensor, nn

from .checks.values import raise_pending
from .config import RatioKLConfig
from .objective.loss import Call, Runtime, linear_policy_loss
from .objective.surrogate import LossOutput
from .ops.contract import DEFAULT_CHUNK_BYTES
from .ops.passes import Execution


class FusedLinearRatioKLLoss(nn.Module):
    """GRPO-family policy loss from hidden states and the lm_head weight, without logits.

        loss_fn = FusedLinearRatioKLLoss(loss_type="dapo", beta=0.04, epsilon_high=0.28)
        out = loss_fn(hidden, lm_head.weight, action_ids, attention_mask, advantages)
        out.loss.backward()

    Args:
        config: the options, or None to give them as keywords; not both.
        backend: "torch", "triton", or None for the fastest that can run here. A named backend
            never falls back.
        chunk_bytes: budget of a pass's tiles together, in bytes; default 128 MiB. Beside them: with
            half-precision leaves at most one float32 sum of min(N, V) x H; on a GPU, where hidden
            is frozen or the head is cut, a copy of the rows with a gradient.
        grads: "backward" runs pass 2 in backward; "forward" runs both passes in forward, so that
            nothing of ours reads hidden or weight afterwards (for ZeRO-3), and cannot be compiled
            as one graph.
        validate: "eager" raises for bad values on an accelerator at once, for one
            synchronisation; None raises at the host's next read (this call's backward, a later
            call, `check`). On the CPU both raise at once.
        process_group: ranks that share the entropy quantile and the token count. None: the
            default group where torch.distributed is initialised; "local": no communication, and
            no factor for gradients that are averaged over ranks afterwards. With tp_group or
            cp_group it must be named, and holds ranks with other sequences.
        tp_group: ProcessGroup over which the head is cut by rows (vocabulary-parallel). weight and
            bias are then this rank's rows in the order of the ranks, as many as there are, or a
            DTensor with placement Shard(0) on the group's mesh; everything else is the same on
            every rank, action_ids and vocab_size, which must be given, count the whole head, and
            only the last rank's rows may end in padding.
        tp_hidden_grad: "whole" adds the gradient of hidden up over tp_group; "part" leaves each
            rank its own part, for callers who add them up themselves.
        cp_group: ProcessGroup over which the tokens of each sequence are cut, contiguous or not
            (context-parallel). Every rank has the same sequences in the same order and its own
            tokens of them; the loss is its own part, and losses and gradients add up over the
            group; metrics are those of the whole.
        **options: the fields of RatioKLConfig.

    `config` and `options` say what is computed, the groups over which ranks, and `tp_hidden_grad`
    what is returned; the others never change a result beyond rounding.

    Raises:
        ValueError: an unknown option, or a value outside its allowed range; groups that overlap.
        TypeError: a wrong Python type.
    """

    def __init__(
        self,
        config: RatioKLConfig | None = None,
        *,
        backend: Literal["torch", "triton"] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        grads: Literal["backward", "forward"] = "backward",
        validate: Literal["eager"] | None = None,
        process_group: object = None,
        tp_group: object = None,
        tp_hidden_grad: Literal["whole", "part"] = "whole",
        cp_group: object = None,
        **options: object,
    ) -> None:
        super().__init__()
        self.config = _config(config, options)
        self.runtime = Runtime(
            execution=Execution(backend=backend, chunk_bytes=chunk_bytes, validate=validate),
            grads=grads,
            process_group=process_group,
            tp_group=tp_group,
            tp_hidden_grad=tp_hidden_grad,
            cp_group=cp_group,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        action_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        *,
        ref_hidden: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        bias: Tensor | None = None,
        sampling_ratio: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        gradient_accumulation_steps: int = 1,
        temperature: float | Tensor | None = None,
        entropy_coef: float | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> LossOutput:
        """Compute the loss, its metrics and per-token outputs.

        Shapes: B sequences of T tokens, H hidden size, V rows of the head. Row t of `hidden`
        predicts `action_ids` at t: shift and cut to the completion before the call. Floating
        tensors may be float64, float32, bfloat16 or float16, each its own. All tensors but
        hidden, weight and bias are constants of the loss; values at inactive tokens never matter.

        Args:
            hidden: [B, T, H]; or [N, H] or [1, N, H] with cu_seqlens.
            weight: [V, H], lm_head.weight as it is; with tp_group this rank's rows of it.
            action_ids: [B, T] or [N], int; in [0, vocab_size) on active tokens.
            attention_mask: like action_ids; bool, int or float, non-zero marks active completion
                tokens.
            advantages: [B], [B, 1], [B, T] or [N].
            old_logps: like action_ids, log-probabilities under the policy that the update starts
                from; None means logp.detach() (ratio 1, gradient kept).
            ref_logps: like action_ids, log-probabilities under the reference model.
            ref_hidden: instead of ref_logps, hidden states of the reference, [B, T, H'] or [N, H'];
                scored without gradient.
            ref_weight, ref_bias: the reference's head, [V', H'] and [V']; left out they are weight
                and bias, detached.
            bias: [V], or None.
            sampling_ratio: rollout importance weight of the policy term; [B], [B, 1], [B, T], [N].
            sampling_logps: like action_ids, the rollout engine's log-probabilities, for the
                off-policy mask; None takes old_logps.
            num_items_in_batch: active tokens of the whole optimizer step over all ranks, a number
                or a tensor with one element; dapo, cispo and vespo divide by it. Below 1 it counts
                as 1. None: this call's, over all ranks.
            gradient_accumulation_steps: >= 1, divides the loss, except where num_items_in_batch
                already spans the step.
            temperature: overrides the config's; a float, or [B], [B, 1], [B, T], [N].
            entropy_coef: overrides the config's; a float or a tensor with one element.
            cu_seqlens: [S + 1] int, boundaries of packed sequences; tokens past the last entry
                must be inactive.

        Returns:
            LossOutput.

        Raises:
            ValueError: a shape, dtype, device or value does not fit; beta != 0 without a
                reference; an id of an active token out of range.
            TypeError: an argument has the wrong Python type.
        """
        call = Call(
            hidden=hidden,
            weight=weight,
            action_ids=action_ids,
            attention_mask=attention_mask,
            advantages=advantages,
            old_logps=old_logps,
            ref_logps=ref_logps,
            ref_hidden=ref_hidden,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            bias=bias,
            sampling_ratio=sampling_ratio,
            sampling_logps=sampling_logps,
            num_items_in_batch=num_items_in_batch,
            gradient_accumulation_steps=gradient_accumulation_steps,
            temperature=temperature,
            entropy_coef=entropy_coef,
            cu_seqlens=cu_seqlens,
        )
        return linear_policy_loss(call, self.config, self.runtime)

    @staticmethod
    def check() -> None:
        """Raise ValueError if an earlier call on an accelerator was given bad values.

        Waits for the device. Without it the error comes in that call's backward or in a later
        call.
        """
        raise_pending(wait=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """AttributeError for an argument of the constructor: it would change nothing."""
        for argument_of, another in _FIXED:
            if name in argument_of.__dataclass_fields__:
                raise AttributeError(
                    f"{name} is an option and fixed: build another loss, for instance from "
                    f"{another}{name}={value!r})"
                )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        changed = (
            f"{field.name}={getattr(self.config, field.name)!r}"
            for field in fields(self.config)
            if getattr(self.config, field.name) != field.default
        )
        return ", ".join(changed)


_FIXED = (
    (RatioKLConfig, "dataclasses.replace(loss_fn.config, "),
    (Runtime, "FusedLinearRatioKLLoss(loss_fn.config, "),
    (Execution, "FusedLinearRatioKLLoss(loss_fn.config, "),
)
"""What the constructor's arguments are fields of, and how a loss with another one is made."""


def _config(config: RatioKLConfig | None, options: dict[str, object]) -> RatioKLConfig:
    if config is not None:
        if not isinstance(config, RatioKLConfig):
            raise TypeError(
                f"config must be a RatioKLConfig or None; got {config!r} of type "
                f"{type(config).__name__}"
            )
        if options:
            raise ValueError(
                f"options came twice: in config and as {', '.join(sorted(options))}; pass one"
            )
        return config
    known = [field.name for field in fields(RatioKLConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ValueError(f"unknown option {name}{hint} Known options: {', '.join(known)}")
    return RatioKLConfig(**options)  # type: ignore[arg-type]

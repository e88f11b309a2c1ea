"""Liger-Kernel's fused losses: its calls and returns, over the public API.

    from ratio_kl.compat.liger import LigerFusedLinearGRPOLoss

Liger-Kernel 0.8.5. Needs nothing of Liger and patches nothing; docs/migrating.md lists where the
results differ on purpose.
"""

import warnings
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..checks.arguments import check_floating
from ..config import RatioKLConfig
from ..module import FusedLinearRatioKLLoss
from ..objective.surrogate import LossOutput
from ..ops.contract import DEFAULT_CHUNK_BYTES
from .liger_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

__all__ = [
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "from_liger",
]

DEFAULTS = RatioKLConfig(beta=0.04, epsilon_high=0.2)
"""Liger's defaults: those named here differ from RatioKLConfig's own."""

OPTIONS = (
    "beta",
    "epsilon_low",
    "epsilon_high",
    "loss_type",
    "max_completion_length",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "temperature",
    "delta",
    "use_bias_correction_kl",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
"""Fields of RatioKLConfig that Liger has, by the same names."""


class LigerFusedLinearGRPOLoss(nn.Module):
    """`liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` on FusedLinearRatioKLLoss.

    Args:
        beta ... vespo_lambda_neg: Liger's, in its order. Those that RatioKLConfig has mean what
            its docstrings say, and may be set again later as attributes.
        use_ref_model: False takes logp.detach() for the reference, whatever a call gives: KL 0.
        compiled, chunk_size: no effect.
        backend, chunk_bytes, grads, process_group: as in FusedLinearRatioKLLoss, but for the
            default of grads: as Liger, this makes the gradients in forward. "backward" compiles.

    Raises:
        ValueError, TypeError: as RatioKLConfig.

    Reference: Liger-Kernel 0.8.5, liger_kernel/chunked_loss/grpo_loss.py.
    """

    def __init__(
        self,
        beta: float = DEFAULTS.beta,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = DEFAULTS.epsilon_low,
        epsilon_high: float | None = DEFAULTS.epsilon_high,
        loss_type: str = DEFAULTS.loss_type,
        max_completion_length: int | None = DEFAULTS.max_completion_length,
        importance_sampling_level: str = DEFAULTS.importance_sampling_level,
        sapo_temperature_pos: float = DEFAULTS.sapo_temperature_pos,
        sapo_temperature_neg: float = DEFAULTS.sapo_temperature_neg,
        temperature: float = DEFAULTS.temperature,
        delta: float | None = DEFAULTS.delta,
        use_bias_correction_kl: bool = DEFAULTS.use_bias_correction_kl,
        vespo_k_pos: float = DEFAULTS.vespo_k_pos,
        vespo_lambda_pos: float = DEFAULTS.vespo_lambda_pos,
        vespo_k_neg: float = DEFAULTS.vespo_k_neg,
        vespo_lambda_neg: float = DEFAULTS.vespo_lambda_neg,
        *,
        backend: Literal["torch", "triton"] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        grads: Literal["backward", "forward"] = "forward",
        process_group: object = None,
    ) -> None:
        super().__init__()
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.execution: dict[str, Any] = {
            "backend": backend,
            "chunk_bytes": chunk_bytes,
            "grads": grads,
            "process_group": process_group,
        }
        self.config = RatioKLConfig(
            beta=beta,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            loss_type=loss_type,
            max_completion_length=max_completion_length,
            importance_sampling_level=importance_sampling_level,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            temperature=temperature,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )
        self.use_ref_model = use_ref_model

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS:
            name, value = "config", replace(self.config, **{name: value})
        super().__setattr__(name, value)
        if name == "use_ref_model" or (name == "config" and hasattr(self, "use_ref_model")):
            # Against logp.detach() the k3 estimate is 0, and so is its gradient.
            config = self.config if self.use_ref_model else replace(self.config, beta=0.0)
            self.loss_fn = FusedLinearRatioKLLoss(config, **self.execution)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name) if name in OPTIONS else super().__getattr__(name)

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss and its metrics.

        Args:
            _input: [B, T, H], `hidden` of FusedLinearRatioKLLoss.
            lin_weight, bias: [V, H] and [V].
            selected_token_ids, attention_mask: [B, T], `action_ids` and `attention_mask`.
            advantages, vllm_is_ratio: [B], [B, 1] or [B, T]; the latter is `sampling_ratio`.
            old_per_token_logps, ref_per_token_logps: [B, T].
            ref_input, ref_weight, ref_bias: `ref_hidden` and its head, for use_ref_model without
                ref_per_token_logps. A ref_weight without ref_bias has no bias.
            num_items_in_batch: as in FusedLinearRatioKLLoss.

        Returns:
            (loss, metrics): 0-d each; metrics is (kl, clip_fraction), without kl for beta = 0;
            both are means over this call's active tokens, detached.

        Raises:
            ValueError, TypeError: as FusedLinearRatioKLLoss; use_ref_model without a reference.
        """
        if not self.use_ref_model:
            ref_per_token_logps = ref_input = None
        elif ref_per_token_logps is None and ref_input is None:
            raise ValueError(
                "use_ref_model=True needs ref_per_token_logps or ref_input; got neither"
            )
        elif ref_per_token_logps is not None and ref_input is not None:
            if not torch.compiler.is_compiling():
                warnings.warn("ref_per_token_logps is used, and ref_input is not", stacklevel=2)
            ref_input = None
        if bias is not None and ref_weight is not None and ref_bias is None:
            # For Liger a reference with a head of its own has no bias but its own.
            rows = check_floating("ref_weight", ref_weight).shape[:1]
            ref_bias = check_floating("bias", bias).new_zeros(rows)
        out = self.loss_fn(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            old_per_token_logps,
            ref_per_token_logps,
            ref_hidden=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            bias=bias,
            sampling_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
        )
        clipped = _clip_fraction(out, self.config.importance_sampling_level)
        return out.loss, (out.metrics.kl, clipped) if self.config.beta != 0 else (clipped,)


def _clip_fraction(out: LossOutput, level: str) -> Tensor:
    """Share of the active tokens that are clipped; our metric counts sequences at their level."""
    if level != "sequence":
        return out.metrics.clip_fraction
    clipped = out.low_clipped | out.high_clipped
    return clipped.sum() / out.metrics.active_tokens.clamp(min=1)


def from_liger(
    module: nn.Module,
    *,
    backend: Literal["torch", "triton"] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    grads: Literal["backward", "forward"] = "forward",
    process_group: object = None,
) -> LigerFusedLinearGRPOLoss:
    """This library's loss with the options that a LigerFusedLinearGRPOLoss has now.

    Args:
        module: Liger's, or one with its attributes.
        backend, chunk_bytes, grads, process_group: as in LigerFusedLinearGRPOLoss.

    Raises:
        TypeError: the module lacks one of Liger's attributes.
        ValueError: as RatioKLConfig.
    """
    names = ("compiled", "use_ref_model", "chunk_size", *OPTIONS)
    absent = [name for name in names if not hasattr(module, name)]
    if absent:
        raise TypeError(
            f"module must be a LigerFusedLinearGRPOLoss; got a {type(module).__name__} without "
            f"{', '.join(absent)}"
        )
    return LigerFusedLinearGRPOLoss(
        **{name: getattr(module, name) for name in names},
        backend=backend,
        chunk_bytes=chunk_bytes,
        grads=grads,
        process_group=process_group,
    )

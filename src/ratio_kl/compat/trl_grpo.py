"""GRPOTrainer with its whole loss from hidden states.

Reference: trl.GRPOTrainer._compute_loss of TRL 1.16, whose options and metrics these are.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from .. import FusedLinearRatioKLLoss, LossOutput, high_entropy_mask
from . import require

require("trl", extra="trl")

from transformers.integrations import is_deepspeed_zero3_enabled  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, nanmax, nanmin  # noqa: E402

from .transformers import FromHidden, Head, logit_modifiers  # noqa: E402
from .trl_head import head_precision, use_ratio_kl  # noqa: E402

# The others that TRL names alike are read from its GRPOConfig.
_SAME_IN_ARGS = (
    "use_bias_correction_kl",
    "epsilon_high",
    "delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
_SAME_IN_TRAINER = (
    "loss_type",
    "importance_sampling_level",
    "beta",
    "epsilon_low",
    "max_completion_length",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "temperature",
)


def loss_options(trainer: Any) -> dict[str, Any]:
    """A GRPOTrainer's options as those of RatioKLConfig, the model's logit modifiers included.

    The entropy bonus is left out: its coefficient may change each step and goes with the call.
    """
    return {
        **{name: getattr(trainer, name) for name in _SAME_IN_TRAINER},
        **{name: getattr(trainer.args, name) for name in _SAME_IN_ARGS},
        **logit_modifiers(trainer.model.config),
    }


class RatioKLGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer, its loss computed by FusedLinearRatioKLLoss inside the model's forward.

    Arguments, options and metrics are GRPOTrainer's. It differs where this library does:
    log-ratios are clamped to +-20 before they are exponentiated, the clip metrics look at the
    ratio before the cap `delta`, and options that TRL would ignore raise ValueError (delta with
    cispo, sapo or vespo; a sequence level with vespo; cispo without its own epsilon_high).
    importance_sampling_level="sequence_token" (GSPO-token) works here.
    """

    __signature__ = inspect.signature(GRPOTrainer)

    entropy_coef: float
    """Weight of the entropy bonus, as TRL's controller has set it."""
    _entropy_window_stats: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_ratio_kl(self)
        # TRL's own collectives run over accelerate's processes, and over none without them.
        self.process_group = None if self.accelerator.num_processes > 1 else "local"
        self.loss_fn = FusedLinearRatioKLLoss(
            process_group=self.process_group,
            # ZeRO-3 holds the head's weight during its forward only.
            grads="forward" if is_deepspeed_zero3_enabled() else "backward",
            **loss_options(self),
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        out, aux_loss = self._loss_in_forward(model, inputs, mask, steps)
        loss = out.loss
        if self._entropy_bonus_enabled:
            self._follow_entropy(out, mask, mode, steps)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
            gathered = self.accelerator.gather_for_metrics(aux_loss)
            self._metrics[mode]["aux_loss"].append(gathered.mean().item())
        self._log_loss(out, mask, mode, inputs["advantages"])
        return loss

    def _loss_in_forward(
        self, model: Any, inputs: dict[str, Any], mask: Tensor, steps: int
    ) -> tuple[LossOutput, Tensor | None]:
        """The loss, and the load-balancing loss of a mixture of experts."""
        ids = inputs["completion_ids"]
        length = ids.shape[1]
        arguments = self._loss_arguments(inputs, mask, steps)

        def from_hidden(hidden: Tensor, head: Head) -> tuple[LossOutput, Tensor | None]:
            hidden = hidden[:, -length - 1 : -1]
            moved = {
                name: value.to(hidden.device) if isinstance(value, Tensor) else value
                for name, value in arguments.items()
            }
            with head_precision(hidden, self.args.cast_lm_head_to_fp32) as hidden:
                out = head.loss(self.loss_fn, hidden, ids.to(hidden.device), **moved)
            return out, head.aux_loss

        call = _LossForLogps(model, from_hidden)
        # TRL knows how a multimodal model's inputs are put together; here it only calls the model.
        self._get_per_token_logps_and_entropies(
            call,
            torch.cat([inputs["prompt_ids"], ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            length,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in _MULTIMODAL},
        )
        assert call.result is not None
        return call.result

    def _loss_arguments(self, inputs: dict[str, Any], mask: Tensor, steps: int) -> dict[str, Any]:
        """Arguments of the loss but hidden, weight and ids."""
        items = inputs["num_items_in_batch"].clamp(min=1.0)
        if self.model.training:
            # It spans the generation batch; the loss wants one accumulation window's share.
            items = items * steps / self.args.steps_per_generation
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        ratio = None
        if corrects or self.loss_type == "vespo":
            ratio = inputs.get("importance_sampling_ratio")
        return {
            "attention_mask": mask,
            "advantages": inputs["advantages"],
            "old_logps": inputs.get("old_per_token_logps"),
            "ref_logps": inputs["ref_per_token_logps"] if self.beta != 0 else None,
            "sampling_ratio": ratio,
            "sampling_logps": inputs.get("sampling_per_token_logps"),
            "num_items_in_batch": items,
            "gradient_accumulation_steps": steps,
            "entropy_coef": self._entropy_coef_now(),
        }

    def _entropy_coef_now(self) -> float:
        """The bonus' coefficient; an adaptive one rests while the entropy is above its target."""
        if not self._entropy_bonus_enabled:
            return 0.0
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    def _follow_entropy(self, out: LossOutput, mask: Tensor, mode: str, steps: int) -> None:
        """Log the policy's loss and, where it adapts, move the entropy bonus' coefficient."""
        policy_loss = out.metrics.policy_loss
        if self.loss_type not in _SPAN_THE_STEP:
            policy_loss = policy_loss * steps
        gathered = self.accelerator.gather(policy_loss)
        self._metrics[mode]["policy_loss"].append(gathered.nanmean().item())
        if mode != "train":
            return
        if self.use_adaptive_entropy:
            quantile = self.top_entropy_quantile
            kept = high_entropy_mask(
                out.entropies, mask.to(out.entropies.device), quantile, self.process_group
            )
            stats = torch.stack([(out.entropies * kept).sum(), kept.sum()])
            window = self._entropy_window_stats
            self._entropy_window_stats = stats if window is None else window + stats
            if self.accelerator.sync_gradients:
                self._adapt_entropy_coef()
        if self.accelerator.sync_gradients:
            self._metrics[mode]["entropy_coef"].append(self.entropy_coef)

    def _adapt_entropy_coef(self) -> None:
        """At the end of an optimizer step, from the mean entropy of its tokens on all ranks."""
        total = self.accelerator.reduce(self._entropy_window_stats, reduction="sum")
        entropy = (total[0] / total[1].clamp(min=1)).item()
        args = self.args
        if entropy <= args.entropy_target:
            self.entropy_coef = min(
                self.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max
            )
        else:
            self.entropy_coef = max(
                self.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min
            )
        self._last_world_entropy, self._entropy_window_stats = entropy, None

    def _log_loss(self, out: LossOutput, mask: Tensor, mode: str, advantages: Tensor) -> None:
        """TRL's metrics, from one exchange over the ranks."""
        mask = (mask != 0).to(out.entropies.device)
        by_sequence = self.importance_sampling_level == "sequence" and advantages.dim() == 1
        low, high = out.low_clipped, out.high_clipped
        if by_sequence:
            low, high = low.any(1, keepdim=True), high.any(1, keepdim=True)
        means = {"entropy": out.entropies}
        if self.beta != 0:
            means["kl"] = out.kl
        if self.loss_type == "cispo":
            means["cispo_clip_ratio"] = high
        elif out.phi is not None:
            phi = out.phi
            if advantages.dim() == 1:
                # One value a sequence: that of its first active token.
                phi = phi.gather(1, mask.int().argmax(1, keepdim=True))
            means["vespo/phi_seq_mean"] = phi
        elif self.loss_type != "sapo":
            means["clip_ratio/low_mean"] = low
            means["clip_ratio/high_mean"] = high
            means["clip_ratio/region_mean"] = low | high
            lowest = self.accelerator.gather(_sequence_means(low, mask))
            highest = self.accelerator.gather(_sequence_means(high, mask))
            self._metrics[mode]["clip_ratio/low_min"].append(nanmin(lowest).item())
            self._metrics[mode]["clip_ratio/high_max"].append(nanmax(highest).item())
        parts = [_sum_and_count(value, mask) for value in means.values()]
        total = self.accelerator.reduce(torch.stack(parts), reduction="sum")
        for name, mean in zip(
            means, (total[:, 0] / total[:, 1].clamp(min=1)).tolist(), strict=True
        ):
            self._metrics[mode][name].append(mean)


_SPAN_THE_STEP = ("dapo", "cispo", "vespo")

_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class _LossForLogps:
    """Stands for the model where TRL scores completions, and keeps the loss of that forward."""

    def __init__(self, model: Any, from_hidden: FromHidden) -> None:
        self._model, self._from_hidden = model, from_hidden
        self.result: tuple[LossOutput, Tensor | None] | None = None

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> Any:
        out, aux_loss = self._model(**inputs, use_cache=False, from_hidden=self._from_hidden)
        self.result = out, aux_loss
        return FusedCausalLMOutput(log_probs=out.logps, aux_loss=aux_loss)


def _sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    """[2]: sum and number of values, one an active token or one a sequence."""
    if values.shape[1] == 1:
        mask = torch.ones_like(values, dtype=torch.bool)
    return torch.stack([torch.where(mask, values, 0).sum().float(), mask.sum().float()])


def _sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's active tokens, NaN for a sequence without any."""
    if values.shape[1] == 1:
        return values[:, 0].float()
    return torch.where(mask, values, 0).sum(1) / mask.sum(1)

"""TRL's fused lm_head, computed here: same signature, options, outputs and output class.

Reference: trl.trainer.utils.add_fused_lm_head of TRL 1.16.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from .. import RatioKLConfig
from . import require

require("trl", extra="trl")

from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput  # noqa: E402

from .transformers import Head, bare_model, call_former, fused_head  # noqa: E402

IGNORED = -100
"""Label of a position that is not scored."""

_STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")
_OUTPUTS = ("log_probs", "entropy", *_STATISTICS)

# What each trainer reads of the policy's outputs.
_OUTPUTS_OF = {
    GRPOTrainer: ("log_probs", "entropy"),
    RLOOTrainer: ("log_probs", "entropy"),
    SFTTrainer: ("log_probs", "entropy", "is_top1"),
    DPOTrainer: _OUTPUTS,
    KTOTrainer: ("log_probs", "entropy", "mean_logits"),
}


def use_ratio_kl(trainer: Any) -> None:
    """Give a trainer's policy, and its reference model if it has one, this library's fused head.

    Call it once, on the trainer as built and before `train()`.

    Args:
        trainer: a GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer or KTOTrainer of TRL.

    Raises:
        TypeError: it is none of these; give its model `add_fused_lm_head` with the outputs that
            it reads.
    """
    outputs = next((out for kind, out in _OUTPUTS_OF.items() if isinstance(trainer, kind)), None)
    if outputs is None:
        known = ", ".join(kind.__name__ for kind in _OUTPUTS_OF)
        raise TypeError(f"trainer must be one of {known}; got {type(trainer).__name__}")
    options: dict[str, Any] = {
        "temperature": getattr(trainer, "temperature", 1.0),
        "cast_lm_head_to_fp32": getattr(trainer.args, "cast_lm_head_to_fp32", False),
    }
    add_fused_lm_head(trainer.model, outputs=outputs, **options)
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        add_fused_lm_head(trainer.accelerator.unwrap_model(reference), **options)


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Let `model(..., labels=labels, fused_lm_head=True)` return log-probabilities, no logits.

    As TRL's: positions whose next label is -100 are not scored and 0 in every field; `shift_labels`
    are scored without a shift; without `fused_lm_head` the former forward runs. Unlike TRL's, it
    also patches a model that PEFT has wrapped or TRL has patched, uses LoRA on the head, and never
    rounds an fp32 head to the dtype of the hidden states.

    Args:
        model: a causal language model of transformers, bare or inside a PEFT model. Only this
            instance changes.
        temperature: > 0, divides the logits.
        cast_lm_head_to_fp32: run the head in float32, outside autocast.
        outputs: fields of trl's FusedCausalLMOutput to fill, of "log_probs" (always filled, and
            loss with it), "entropy", "log_sum_sq_probs", "mean_logits" and "is_top1".

    Raises:
        TypeError: the model has no lm_head.
        ValueError: an unknown output, or a temperature that is not > 0.
    """
    unknown = set(outputs) - set(_OUTPUTS)
    if unknown:
        raise ValueError(f"outputs must be among {_OUTPUTS}; got {sorted(unknown)}")
    RatioKLConfig(temperature=temperature)  # refuses what is no temperature
    fused_head(model)
    model = bare_model(model)
    inner = model.forward
    scoring = _Scoring(temperature, cast_lm_head_to_fp32, frozenset(outputs))

    # Its signature stays that of the class: `generate` checks its keywords against it.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            own = {
                "labels": labels,
                "shift_labels": shift_labels,
                "num_items_in_batch": num_items_in_batch,
            }
            own = {name: value for name, value in own.items() if value is not None}
            return call_former(inner, self, *args, **own, **kwargs)
        text_config = self.config.get_text_config()
        if getattr(text_config, "output_router_logits", False):
            # A multimodal model heeds the keyword only.
            kwargs.setdefault("output_router_logits", True)
        aux_coef = getattr(text_config, "router_aux_loss_coef", 0.0)

        def score(hidden: Tensor, head: Head) -> FusedCausalLMOutput:
            if shift_labels is not None:
                targets = shift_labels
            elif labels is not None:
                hidden, targets = hidden[:, :-1], labels[:, 1:]
            else:
                raise ValueError("fused_lm_head=True needs labels or shift_labels; got neither")
            return scoring(hidden, head, targets, num_items_in_batch, aux_coef)

        kwargs["use_cache"] = False
        return call_former(inner, self, *args, from_hidden=score, **kwargs)

    model.forward = MethodType(forward, model)


@dataclass(frozen=True)
class _Scoring:
    """The options of a fused head."""

    temperature: float
    cast_to_fp32: bool
    outputs: frozenset[str]

    def __call__(
        self,
        hidden: Tensor,
        head: Head,
        targets: Tensor,
        num_items: Tensor | float | None,
        aux_coef: float,
    ) -> FusedCausalLMOutput:
        """Score `targets` [B, T] from `hidden` [B, T, H]; the loss is their mean negative logp."""
        targets = targets.to(hidden.device)
        mask = targets != IGNORED
        statistics = self.outputs & set(_STATISTICS)
        options = {"return_statistics": True} if statistics else {}
        with head_precision(hidden, self.cast_to_fp32) as hidden:
            scores = head.logprob(
                hidden,
                targets,
                mask,
                temperature=self.temperature,
                return_entropy="entropy" in self.outputs,
                **options,
            )
        count = torch.as_tensor(mask.sum() if num_items is None else num_items, device=mask.device)
        loss = -scores.logps.sum() / count.clamp(min=1)
        if head.aux_loss is not None:
            loss = loss + aux_coef * head.aux_loss.to(loss.device)
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=scores.logps,
            entropy=scores.entropies if "entropy" in self.outputs else None,
            **{name: getattr(scores, name) for name in statistics},
            label_mask=mask,
            aux_loss=head.aux_loss,
        )


@contextmanager
def head_precision(hidden: Tensor, cast_to_fp32: bool) -> Iterator[Tensor]:
    """The hidden states as the head takes them; for a head in float32, widened and no autocast."""
    if not cast_to_fp32:
        yield hidden
        return
    with torch.autocast(hidden.device.type, enabled=False):
        yield hidden.float()

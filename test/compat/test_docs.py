"""The code of README's section on TRL, and of docs/migrating.md, on a tiny model."""

import pytest

pytest.importorskip("trl", reason="needs the package trl (extra trl)")

from datasets import Dataset
from trl import GRPOConfig, RLOOConfig, SFTConfig

from compat.tiny import llama, prompts, reward, tokenizer
from documents import blocks, run

SETTINGS = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
ROLLOUTS = {"num_generations": 4, "max_completion_length": 4}


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_readme(folder, tmp_path):
    """A folder stands for `model`, so that each trainer finds the tokenizer, too."""
    answers = [text + " w7" for text in prompts()["prompt"]]
    scope = {
        "model": folder,
        "reward": reward,
        "prompts": prompts(),
        "texts": Dataset.from_dict({"text": answers}),
        "args": GRPOConfig(str(tmp_path), **SETTINGS, **ROLLOUTS),
        "rloo_args": RLOOConfig(str(tmp_path), **SETTINGS, **ROLLOUTS),
        "sft_args": SFTConfig(str(tmp_path), **SETTINGS),
    }
    found = blocks("README.md", "python", "## In TRL and transformers")
    assert len(found) == 4
    for block in found:
        run(block, scope)
        assert scope["trainer"].state.global_step == 1


def test_migrating_from_trl(folder, tmp_path):
    scope = {}
    for block in blocks("docs/migrating.md", "python", "## TRL"):
        run(block, scope)
    args = GRPOConfig(str(tmp_path), **SETTINGS, **ROLLOUTS)
    for train in ("train", "train_whole_loss"):
        scope[train](folder, reward, args, prompts())


def test_migrating_from_transformers():
    (block,) = blocks("docs/migrating.md", "python", "## transformers")
    scope = {}
    run(block, scope)
    assert scope["scores"].logps.shape == (4, 19)
    assert scope["out"].loss.isfinite()

"""The code of README's section on TRL, and of docs/migrating.md, on a tiny model."""

import pytest
import torch

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


def test_readme_in_a_trainer():
    """Scored at the loss's temperature, an untouched policy has ratio 1 and KL 0; at 1 it has not
    (OpenRLHF/OpenRLHF#853)."""
    (block,) = blocks("README.md", "python", "## In a trainer")
    scope = {"torch": torch}
    run(block, scope)
    model = llama()
    policy = scope["PolicyWithLoss"](model, loss_type="grpo", beta=0.04, temperature=0.7)
    ids = torch.randint(model.config.vocab_size, (2, 6))
    batch = ids, torch.ones_like(ids), (torch.arange(6) > 2).expand(2, 6)
    for temperature, agrees in ((0.7, True), (1.0, False)):
        logps = scope["score"](model, *batch, temperature=temperature)
        out = policy(*batch, torch.randn(2), old_logps=logps, ref_logps=logps)
        assert (out.ratio == 1).all() == agrees
        assert (out.metrics.kl == 0) == agrees
    out.loss.backward()
    assert model.lm_head.weight.grad.any()


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

"""A training step through a whole model: the contenders agree, and disagreement is found."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl", reason="needs the package trl (extra trl)")

from benchmark import trainer_step

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def rows():
    """128 tokens: four completions, one group of rewards, as few as a trainer takes."""
    torch.manual_seed(0)
    model = trainer_step.MODELS["tiny"]().train()
    return trainer_step.measure("tiny", model, 128, trainer_step.SIZES["cpu"], 0.1)


def test_every_contender_has_its_figures(rows):
    assert len(rows) == len(trainer_step.CONTENDERS) * len(trainer_step.BATCHES)
    assert all(row.status == "ok" and row.ms > 0 and row.extra_bytes > 0 for row in rows)
    by_name = {row.contender: row for row in rows if row.batch == "every token active"}
    logits = 128 * 8192 * 4
    assert by_name["full logits"].extra_bytes > 3 * logits
    assert by_name["RatioKLGRPOTrainer"].extra_bytes < by_name["full logits"].extra_bytes


def test_the_heads_agree_and_a_wrong_one_is_found(rows):
    assert trainer_step.disagreements(rows, 1e-4) == []
    for field in ("loss", "grad_norm"):
        wrong = [
            replace(row, **{field: getattr(row, field) + 0.1})
            if row.contender == "RatioKLGRPOTrainer"
            else row
            for row in rows
        ]
        assert len(trainer_step.disagreements(wrong, 1e-4)) == len(trainer_step.BATCHES)

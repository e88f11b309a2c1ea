"""GRPOTrainer over two ranks, with TRL's loss and with ours: quantile, counts and metrics."""

import os
import warnings

import pytest

pytest.importorskip("trl", reason="needs the package trl (extra trl)")

from accelerate.state import AcceleratorState, GradientState, PartialState
from trl import GRPOTrainer

from compat.test_trl_grpo import build, vary
from compat.tiny import assert_same_run, llama, run, tokenizer
from ratio_kl.compat.trl import RatioKLGRPOTrainer, use_ratio_kl

TWO = pytest.mark.parametrize("ranks", [2], indirect=True)


def load(rank, size):
    """To import TRL takes longer than to train: it is done before the clock of the run starts."""


def check_run(rank, size, folder, options, changes):
    warnings.simplefilter("default")  # other packages' about each other
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true")

    def trained(cls, front=None):
        trainer = build(cls, folder, folder, max_steps=2, **options)
        assert trainer.accelerator.num_processes == size
        if front is not None:
            front(trainer)
        return run(trainer, lambda t: vary(t, changes, seed=rank))

    try:
        expected = trained(GRPOTrainer)
        assert_same_run(trained(GRPOTrainer, use_ratio_kl), expected)
        assert_same_run(trained(RatioKLGRPOTrainer), expected)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        for name in places:
            del os.environ[name]


@TWO
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (
            {
                "beta": 0.1,
                "top_entropy_quantile": 0.5,
                "use_adaptive_entropy": True,
                "entropy_target": 2.0,
                "entropy_coef_delta": 0.01,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 2,
            },
            ("tool_mask",),
        ),
        pytest.param(
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            ("tool_mask",),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dapo, quantile, adaptive entropy", "grpo, sequence"],
)
def test_two_ranks(ranks, tmp_path, options, changes):
    llama().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    ranks.run(load)
    ranks.run(check_run, str(tmp_path), options, changes)

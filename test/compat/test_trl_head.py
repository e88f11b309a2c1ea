"""add_fused_lm_head beside TRL's own, and the trainers that use it."""

import copy
import inspect
import itertools

import pytest
import torch

pytest.importorskip("trl", reason="needs the package trl (extra trl)")

import trl.trainer.utils as theirs
from datasets import Dataset
from transformers import Gemma2Config, Gemma2ForCausalLM, MixtralConfig, MixtralForCausalLM
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from compat.tiny import V, assert_near, assert_same_run, llama, prompts, reward, run, tokenizer
from ratio_kl import linear_logprob
from ratio_kl.compat import transformers as front
from ratio_kl.compat import trl_head
from ratio_kl.compat.trl import add_fused_lm_head, use_ratio_kl

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
FIELDS = ("loss", *ALL, "label_mask", "aux_loss")


def batch():
    """Two sequences of other lengths, their prompts and padding unlabelled."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (2, 9), generator=generator)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, 6:] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def gemma():
    """A softcap, tied embeddings, hidden states scaled on entry."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=2.0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def mixtral():
    """A mixture of experts with its load-balancing loss."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.3,
        initializer_range=0.2,
    )
    return MixtralForCausalLM(config)


def scored(model, add, inputs, **options):
    """Outputs and gradients of the fused call on a copy of `model`."""
    model = copy.deepcopy(model).eval()
    call = {name: options.pop(name) for name in ("num_items_in_batch",) if name in options}
    add(model, **options)
    out = model(**inputs, **call, fused_lm_head=True)
    total = out.loss + out.log_probs.square().sum()
    if out.entropy is not None:
        total = total + out.entropy.square().sum()
    with torch.autocast("cpu", enabled=False):
        total.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def assert_same_scores(ours, theirs):
    (got, got_grads), (expected, expected_grads) = ours, theirs
    assert type(got) is type(expected)
    for name in FIELDS:
        value, reference = getattr(got, name), getattr(expected, name)
        assert (value is None) == (reference is None), name
        if reference is not None:
            assert value.dtype == reference.dtype, name
            assert_near(value, reference, name)
    for name, reference in expected_grads.items():
        if reference is None:
            assert got_grads[name] is None
        else:
            assert_near(got_grads[name], reference, name)


@pytest.mark.parametrize("make", [llama, gemma, mixtral], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {"outputs": ALL},
        {"outputs": ALL, "temperature": 0.7},
        {"outputs": ALL, "cast_lm_head_to_fp32": True},
        {"outputs": ALL, "num_items_in_batch": 3},
        {},
        *({"outputs": pair} for pair in itertools.combinations(ALL, 2)),
    ],
    ids=str,
)
def test_every_output_is_trls(make, options):
    model, inputs = make(), batch()
    ours = scored(model, add_fused_lm_head, inputs, **options)
    assert_same_scores(ours, scored(model, theirs.add_fused_lm_head, inputs, **options))


def test_shifted_labels_are_not_shifted_again():
    model, inputs = llama(), batch()
    labels = inputs.pop("labels")
    inputs["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    ours = scored(model, add_fused_lm_head, inputs, outputs=ALL)
    assert ours[0].log_probs.shape == labels.shape
    assert_same_scores(ours, scored(model, theirs.add_fused_lm_head, inputs, outputs=ALL))


def test_nothing_to_score_is_a_zero_with_a_graph():
    """trl#7077: a fully masked micro-batch must not fail in backward()."""
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    out, grads = scored(llama(), add_fused_lm_head, inputs)
    assert out.loss.item() == 0
    assert not grads["lm_head.weight"].any()


def test_in_bfloat16_it_is_nearer_to_the_exact_answer():
    """TRL rounds the logits to the autocast dtype; here they never are, so the runs differ."""
    model, inputs = llama().bfloat16(), batch()
    hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
    logits = hidden[:, :-1].double() @ model.lm_head.weight.double().T
    labels = inputs["labels"][:, 1:]
    exact = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    exact = exact.where(labels != -100, 0)
    error = {
        name: (scored(model, add, inputs)[0].log_probs - exact).abs().max().item()
        for name, add in [("ours", add_fused_lm_head), ("theirs", theirs.add_fused_lm_head)]
    }
    assert error["ours"] < 1e-4 < error["theirs"]


def test_an_fp32_head_on_bf16_states_is_not_rounded():
    """TRL scores in the dtype of the hidden states unless told otherwise."""
    model, inputs = llama().bfloat16(), batch()
    model.lm_head.float()
    plain = scored(model, add_fused_lm_head, inputs)[0].log_probs
    cast = scored(model, add_fused_lm_head, inputs, cast_lm_head_to_fp32=True)[0].log_probs
    assert torch.equal(plain, cast)


def test_the_float32_head_is_left_out_of_autocast(monkeypatch):
    model, inputs = llama().bfloat16(), batch()
    options = {"cast_lm_head_to_fp32": True, "outputs": ALL}
    taken = []

    def watched(hidden, *args, **keywords):
        taken.append((hidden.dtype, torch.is_autocast_enabled("cpu")))
        return linear_logprob(hidden, *args, **keywords)

    monkeypatch.setattr(front, "linear_logprob", watched)
    with torch.autocast("cpu", torch.bfloat16):
        ours = scored(model, add_fused_lm_head, inputs, **options)[0]
        reference = scored(model, theirs.add_fused_lm_head, inputs, **options)[0]
    assert taken == [(torch.float32, False)]
    for name in ALL:
        assert_near(getattr(ours, name), getattr(reference, name), name)


def test_signatures_are_trls():
    ours, reference = (inspect.signature(f) for f in (add_fused_lm_head, theirs.add_fused_lm_head))
    assert list(ours.parameters) == list(reference.parameters)
    for name, parameter in reference.parameters.items():
        assert ours.parameters[name].default == parameter.default
        assert ours.parameters[name].kind == parameter.kind
    assert set(FIELDS) == set(theirs.FusedCausalLMOutput.__dataclass_fields__)


def test_the_forward_keeps_its_signature_and_generation_its_tokens():
    """`generate` checks its keywords against the signature of forward."""
    model = llama().eval()
    signature = inspect.signature(model.forward)
    ids = batch()["input_ids"][:1]
    before = model.generate(ids, max_new_tokens=5, do_sample=False)
    add_fused_lm_head(model)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), before)
    assert "forward" not in vars(llama())


def test_a_model_that_trl_has_patched_and_a_second_call():
    """verl#1720: two patches of one forward; here the later one decides, whichever it was."""
    model, inputs = llama(), batch()

    def both(model, **options):
        theirs.add_fused_lm_head(model, temperature=3.0)
        add_fused_lm_head(model, temperature=2.0)
        add_fused_lm_head(model, **options)

    ours = scored(model, both, inputs, temperature=0.7)
    assert_same_scores(ours, scored(model, theirs.add_fused_lm_head, inputs, temperature=0.7))


@pytest.mark.parametrize(
    ("options", "inputs", "named"),
    [
        ({"outputs": ("log_probs", "perplexity")}, {}, "perplexity"),
        ({"temperature": 0.0}, {}, "temperature"),
        ({"temperature": -1.0}, {}, "temperature"),
        ({}, {"labels": None}, "labels"),
    ],
)
def test_what_cannot_be_is_refused(options, inputs, named):
    with pytest.raises(ValueError, match=named):
        scored(llama(), add_fused_lm_head, batch() | inputs, **options)


SETTINGS = {
    "per_device_train_batch_size": 4,
    "max_steps": 5,
    "learning_rate": 0.05,
    "optim": "sgd",
    "seed": 3,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def texts(kind):
    """The prompts with answers, as each trainer wants them."""
    columns = {"prompt": prompts()["prompt"]}
    answers = [f" w{(5 * i) % 50} w{(3 * i) % 50} w7" for i in range(16)]
    if kind is SFTTrainer:
        return Dataset.from_dict(columns | {"completion": answers})
    if kind is DPOTrainer:
        return Dataset.from_dict(columns | {"chosen": answers, "rejected": answers[::-1]})
    labels = [i % 2 == 0 for i in range(16)]
    return Dataset.from_dict(columns | {"completion": answers, "label": labels})


def build(kind, config, folder, tmp_path, **options):
    arguments = {"model": folder, "processing_class": tokenizer()}
    if kind in (RLOOTrainer, GRPOTrainer):
        arguments |= {"reward_funcs": reward, "train_dataset": prompts()}
        options = {"num_generations": 4, "max_completion_length": 8} | options
    else:
        arguments["train_dataset"] = texts(kind)
    args = config(output_dir=str(tmp_path), **SETTINGS | options)
    return kind(args=args, **arguments)


TRAINERS = {
    "RLOO": (RLOOTrainer, RLOOConfig, {"beta": 0.1, "temperature": 0.8}),
    "SFT": (SFTTrainer, SFTConfig, {"completion_only_loss": True}),
    "SFT, dft": (SFTTrainer, SFTConfig, {"loss_type": "dft", "gradient_accumulation_steps": 2}),
    "DPO": (DPOTrainer, DPOConfig, {}),
    "DPO, weighted": (DPOTrainer, DPOConfig, {"use_weighting": True}),
    "KTO": (KTOTrainer, KTOConfig, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("kind", "config", "options"), TRAINERS.values(), ids=TRAINERS)
def test_a_trainer_after_one_call(folder, tmp_path, kind, config, options):
    expected = run(build(kind, config, folder, tmp_path, **options))
    got = run(build(kind, config, folder, tmp_path, **options), use_ratio_kl)
    assert_same_run(got, expected)


@pytest.mark.parametrize("kind", trl_head._OUTPUTS_OF, ids=lambda kind: kind.__name__)
def test_each_trainer_gets_the_outputs_that_it_asks_trl_for(folder, tmp_path, kind):
    """So that a release that asks for more shows here and not as a None in a metric."""
    configs = {RLOOTrainer: RLOOConfig, SFTTrainer: SFTConfig, DPOTrainer: DPOConfig}
    config = configs.get(kind, GRPOConfig if kind is GRPOTrainer else KTOConfig)
    trainer = build(kind, config, folder, tmp_path)
    asked = inspect.getclosurevars(trainer.model.forward.__func__).nonlocals
    assert set(asked["outputs"]) <= set(trl_head._OUTPUTS_OF[kind])
    assert asked["temperature"] == getattr(trainer, "temperature", 1.0)


def test_another_trainer_is_refused():
    with pytest.raises(TypeError, match="trainer must be one of GRPOTrainer"):
        use_ratio_kl(object())


def test_a_temperature_that_is_not_positive_is_refused_at_once():
    with pytest.raises(ValueError, match="temperature must be > 0 and finite; got 0"):
        add_fused_lm_head(torch.nn.Linear(2, 2), temperature=0)
    with pytest.raises(TypeError, match="temperature must be a number .*; got '1' of type str"):
        add_fused_lm_head(torch.nn.Linear(2, 2), temperature="1")

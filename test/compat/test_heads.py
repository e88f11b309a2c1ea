"""Heads that PEFT or accelerate has changed: used as they compute, or refused, never ignored."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs the package transformers (extra transformers)")
pytest.importorskip("peft", reason="needs the package peft (extra test)")

import peft
from accelerate import dispatch_model

from compat.tiny import V, assert_near, llama
from ratio_kl.compat.transformers import fused_head

RANK = 3
"""Neither a multiple of anything nor 1."""


def ids():
    return torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(2))


def own_logps(model, **inputs):
    logits = model(input_ids=ids(), **inputs).logits[:, -7:-1]
    return logits.log_softmax(-1).gather(-1, ids()[:, 1:, None])[..., 0]


def fused_logps(model, **inputs):
    """The last 7 positions: prompt tuning puts its own in front."""
    return model(
        input_ids=ids(),
        from_hidden=lambda hidden, head: head.logprob(hidden[:, -7:-1], ids()[:, 1:]).logps,
        **inputs,
    )


def gradients(model, value):
    model.zero_grad()
    value.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_as_logits(model, *trained):
    """Log-probabilities and every gradient; each name in `trained` must have one."""
    fused_head(model)
    torch.manual_seed(7)
    expected = own_logps(model)
    theirs = gradients(model, expected)
    torch.manual_seed(7)
    got = fused_logps(model)
    ours = gradients(model, got)
    assert_near(got.to(expected.dtype), expected, "log-probabilities")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_near(ours[name], theirs[name], name)
    for part in trained:
        assert any(part in name and grad.any() for name, grad in ours.items()), part


def lora(*targets, init=False, **options):
    """LoRA whose adapters are not zero to begin with."""
    return peft.LoraConfig(
        r=RANK, lora_alpha=5, target_modules=list(targets), init_lora_weights=init, **options
    )


@pytest.mark.parametrize("first", ["head", "peft"])
def test_lora_on_the_backbone(first):
    model = llama()
    if first == "head":
        fused_head(model)
    assert_same_as_logits(peft.get_peft_model(model, lora("q_proj")), "lora_A", "lora_B")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("bias", ["", "head", "adapter", "head and adapter"])
@pytest.mark.filterwarnings("ignore:.*has no bias. This means that merging:UserWarning")
def test_lora_on_the_head(dropout, bias):
    """trl#4612, unsloth#9331: an adapter on lm_head that trained nothing."""
    model = llama()
    if "head" in bias:
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, V))
    config = lora("lm_head", lora_dropout=dropout, lora_bias="adapter" in bias)
    wrapped = peft.get_peft_model(model, config).train()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name and parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    assert_same_as_logits(wrapped, "lm_head.lora_A", "lm_head.lora_B")


def test_lora_on_the_head_learns():
    model = peft.get_peft_model(llama(), lora("lm_head", init=True))
    fused_head(model)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    before = fused_logps(model).sum().item()
    for _ in range(10):
        optimizer.zero_grad()
        (-fused_logps(model).sum()).backward()
        optimizer.step()
    up = next(p for name, p in model.named_parameters() if "lm_head.lora_B" in name)
    assert up.any()
    assert fused_logps(model).sum().item() > before + 1


def test_an_adapter_in_float32_on_a_head_in_bfloat16_is_not_rounded():
    """Merged into the weight, a small delta would be lost to bfloat16's 8 bits."""
    model = peft.get_peft_model(llama().bfloat16(), lora("lm_head"))
    layer = model.get_base_model().lm_head
    with torch.no_grad():
        for parameter in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            parameter.mul_(0.02)
    fused_head(model)
    with model.disable_adapter():
        without = fused_logps(model)
    delta = layer.get_delta_weight("default").double()
    hidden = model.get_base_model().model(input_ids=ids()).last_hidden_state[:, :-1].double()
    weight = layer.get_base_layer().weight.double()
    exact = (hidden @ (weight + delta).T).log_softmax(-1).gather(-1, ids()[:, 1:, None])[..., 0]
    error = (fused_logps(model) - exact).abs().max().item()
    assert error < 1e-4 < (without - exact).abs().max().item()


def test_two_adapters_at_once_and_each_alone():
    model = peft.get_peft_model(llama(), lora("lm_head"), adapter_name="first")
    model.add_adapter("second", lora("lm_head"))
    for active in (["first"], ["second"], ["first", "second"]):
        model.base_model.set_adapter(active)
        assert_same_as_logits(model, *(f"lora_A.{name}" for name in active))


def test_a_disabled_or_merged_adapter():
    model = peft.get_peft_model(llama(), lora("lm_head"))
    fused_head(model)
    active = fused_logps(model)
    with model.disable_adapter():
        disabled = fused_logps(model)
        assert_near(disabled, own_logps(model), "disabled")
    assert not torch.allclose(disabled, active, rtol=0, atol=0.1)
    model.merge_adapter()
    assert_near(fused_logps(model), active, "merged")
    with model.disable_adapter():
        assert_near(fused_logps(model), disabled, "disabled while merged")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("first", ["head", "peft"])
def test_a_head_that_is_trained_whole(tied, first):
    """modules_to_save keeps a copy of its own, that the original's weight says nothing about."""
    model = llama(tie_word_embeddings=tied)
    if first == "head":
        fused_head(model)
    config = lora("q_proj", modules_to_save=["lm_head"], ensure_weight_tying=tied)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        wrapped.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    assert_same_as_logits(wrapped, "modules_to_save")
    with wrapped.disable_adapter():
        assert_near(fused_logps(wrapped), own_logps(wrapped), "the original")


def test_prompt_tuning():
    """Its tokens stand in front of the caller's."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(llama(), config)
    assert_same_as_logits(model, "prompt")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (lora("lm_head", use_dora=True), "'default' on the lm_head is a DoraLinearVariant"),
        (peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), "must be a torch.nn"),
        (peft.LoHaConfig(target_modules=["lm_head"], r=RANK), "must be a torch.nn.Linear"),
        (peft.TrainableTokensConfig(target_modules=["lm_head"], token_indices=[4]), "torch.nn"),
    ],
)
def test_an_adapter_that_is_no_sum_of_products_is_refused(config, complaint):
    model = peft.get_peft_model(llama(), config)
    fused_head(model)
    with pytest.raises(ValueError, match=complaint):
        fused_logps(model)


def test_a_model_with_accelerates_hooks():
    """device_map: each part has a hook that moves what it is given."""
    model = llama()
    expected = own_logps(model)
    parts = dict.fromkeys(["model", "lm_head"], "cpu")
    dispatched = dispatch_model(copy.deepcopy(model), parts, force_hooks=True)
    assert hasattr(dispatched.lm_head, "_hf_hook")
    fused_head(dispatched)
    assert_near(fused_logps(dispatched), expected, "dispatched")
    assert_near(own_logps(dispatched), expected, "its own forward afterwards")


def test_a_head_that_is_offloaded_is_refused(tmp_path):
    parts = {"model": "cpu", "lm_head": "disk"}
    model = dispatch_model(llama(), parts, main_device="cpu", offload_dir=str(tmp_path))
    fused_head(model)
    with pytest.raises(ValueError, match="on the meta device"):
        fused_logps(model)

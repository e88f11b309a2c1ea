"""Any causal language model without logits: what the model itself says, from its own forward.

Every family whose logits are more than hidden @ weight.T is here, with factors that show.
"""

import copy
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the package transformers (extra transformers)")

import transformers

import ratio_kl
from cases.meter import metered
from compat.tiny import SIZES, H, V, assert_near, llama
from ratio_kl import FusedLinearRatioKLLoss
from ratio_kl.compat.transformers import fused_head, logit_modifiers

LATENT = {  # multi-head latent attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "Llama": ({}, {}),
    "Gemma2": ({"final_logit_softcapping": 2.0, "head_dim": 8}, {"softcap": 2.0}),
    "Gemma3": ({"final_logit_softcapping": 2.0, "head_dim": 8}, {"softcap": 2.0}),
    "VaultGemma": ({"final_logit_softcapping": 2.0, "head_dim": 8}, {"softcap": 2.0}),
    "NanoChat": ({"final_logit_softcapping": 2.0}, {"softcap": 2.0}),
    "RecurrentGemma": (
        {"logits_soft_cap": 2.0, "lru_width": 32, "block_types": ["attention"]},
        {"softcap": 2.0},
    ),
    "Cohere": ({"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "Cohere2": ({"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "Granite": ({"logits_scaling": 4.0}, {"logit_scale": 0.25}),
    "GraniteMoe": ({"logits_scaling": 4.0}, {"logit_scale": 0.25}),
    "GraniteMoeShared": ({"logits_scaling": 4.0}, {"logit_scale": 0.25}),
    "HyperCLOVAX": ({"logits_scaling": 0.25}, {"logit_scale": 0.25}),
    "FalconH1": ({"lm_head_multiplier": 0.25, "mamba_chunk_size": 8}, {"logit_scale": 0.25}),
    # Scales what enters the head.
    "MiniCPM3": ({"dim_model_base": 8, "num_key_value_heads": 4, **LATENT}, {}),
    "Mpt": ({"logit_scale": 0.25, "d_model": 32, "n_heads": 4, "n_layers": 2}, {}),  # not read
    "Qwen3": ({"head_dim": 8}, {}),
    "Qwen3Moe": ({"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}, {}),
    "GPT2": ({"n_embd": 32, "n_head": 4, "n_layer": 2}, {}),
    "BioGpt": ({}, {}),  # its head has another name
    "Phi": ({}, {}),  # a bias
    "Bert": ({"is_decoder": True}, {}),  # a layer and a bias between backbone and vocabulary
    "ModernBertDecoder": ({}, {}),
    "Mamba": ({}, {}),  # reads the dtype of its head's weight
}
NAMES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Bert": ("BertConfig", "BertLMHeadModel"),
}


def build(family):
    """A model of the family, with weights large enough for its modifiers to show."""
    config_name, model_name = NAMES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    if not hasattr(transformers, model_name):
        pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**SIZES | FAMILIES[family][0])
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ids(batch=2, length=7):
    return torch.randint(3, V, (batch, length), generator=torch.Generator().manual_seed(2))


def own_logps(model, input_ids, **inputs):
    """From the model's logits: log-probability of each next id."""
    logits = model(input_ids=input_ids, **inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def next_logps(input_ids, **options):
    """The same as a function for `from_hidden`."""
    return lambda hidden, head: head.logprob(hidden[:, :-1], input_ids[:, 1:], **options).logps


def gradients(model, value):
    model.zero_grad()
    value.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_as_logits(model, **inputs):
    """Log-probabilities and the gradient of every parameter."""
    reference = copy.deepcopy(model)
    input_ids = ids()
    expected = own_logps(reference, input_ids, **inputs)
    got = model(input_ids=input_ids, from_hidden=next_logps(input_ids), **inputs)
    assert_near(got, expected, "log-probabilities")
    ours, theirs = gradients(model, got), gradients(reference, expected)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_near(ours[name], theirs[name], name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_what_its_logits_say(family):
    """trl#6629, unsloth-zoo#593: softcap and scale must be the model's, in its direction."""
    model = build(family)
    plain = {"logit_scale": 1.0, "softcap": None, "vocab_size": None}
    assert logit_modifiers(model.config) == plain | FAMILIES[family][1]
    fused_head(model)
    assert_same_as_logits(model)


def test_a_bias_of_the_head():
    """trl#7065: a bias left out."""
    model = llama()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-5, 5, V))
    fused_head(model)
    assert_same_as_logits(model)


def test_tied_embeddings():
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fused_head(model)
    assert_same_as_logits(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    fused_head(model)
    assert_same_as_logits(model)


def test_only_the_positions_asked_for():
    """logits_to_keep cuts before the head, and so does the caller."""
    model, input_ids = llama(), ids()
    expected = own_logps(model, input_ids)[:, -3:]
    fused_head(model)
    kept = model(
        input_ids=input_ids,
        logits_to_keep=4,
        from_hidden=lambda hidden, head: head.logprob(hidden[:, :-1], input_ids[:, -3:]).logps,
    )
    assert_near(kept, expected, "logits_to_keep")


def test_a_mask_saves_the_work():
    model, input_ids = llama(), ids(4, 33)
    fused_head(model)
    mask = torch.zeros(4, 32)
    mask[:, -4:] = 1

    def cost(mask):
        with metered() as meter, torch.no_grad():
            model(input_ids=input_ids, from_hidden=next_logps(input_ids, attention_mask=mask))
        return meter.multiplications

    head_rows = (cost(torch.ones(4, 32)) - cost(mask)) / (V * H)
    assert head_rows == 4 * 28


def test_the_loss_in_forward():
    model, input_ids = build("Cohere"), ids()
    mask, advantages = torch.ones(2, 6), torch.tensor([1.0, -1.0])
    loss_fn = FusedLinearRatioKLLoss(loss_type="grpo", **logit_modifiers(model.config))
    rest = input_ids[:, 1:], mask, advantages, torch.full((2, 6), -4.0)

    reference = copy.deepcopy(model)
    hidden = reference.model(input_ids=input_ids).last_hidden_state[:, :-1]
    expected = loss_fn(hidden, reference.lm_head.weight, *rest)
    fused_head(model)
    got = model(
        input_ids=input_ids,
        from_hidden=lambda hidden, head: head.loss(loss_fn, hidden[:, :-1], *rest),
    )
    assert_near(got.loss, expected.loss, "loss")
    ours, theirs = gradients(model, got.loss), gradients(reference, expected.loss)
    for name in theirs:
        assert_near(ours[name], theirs[name], name)


def test_a_loss_that_misses_the_models_scale_is_refused():
    model = build("Cohere")
    fused_head(model)
    with pytest.raises(ValueError, match="logit_scale=1.0, but the model's logits need 0.25"):
        model(
            input_ids=ids(),
            from_hidden=lambda hidden, head: head.loss(
                FusedLinearRatioKLLoss(), hidden, ids(), torch.ones(2, 7), torch.ones(2)
            ),
        )


class MupLlama(transformers.LlamaForCausalLM):
    """Divides by a factor whose name nobody knows, as Phi-3-small's remote code does."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / self.config.mup_width_multiplier
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_that_the_config_does_not_tell_is_refused(dtype):
    """trl#6629: logits scaled by the model and not by the loss. The way out is to say it."""
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.2, mup_width_multiplier=8.0)
    torch.manual_seed(0)
    model, input_ids = MupLlama(config), ids()
    expected = own_logps(model, input_ids)
    fused_head(model)
    model.to(dtype)
    with pytest.raises(ValueError, match="final_logit_softcapping .* to what it does"):
        model(input_ids=input_ids, from_hidden=next_logps(input_ids))
    model.config.logit_scale = 1 / 8
    got = model(input_ids=input_ids, from_hidden=next_logps(input_ids))
    if dtype == torch.float32:
        assert_near(got, expected, "log-probabilities")


def test_a_softcap_that_only_the_config_has_is_refused():
    """Gemma 3's multimodal model caps nothing, whatever its text config says."""
    model = llama()
    model.config.final_logit_softcapping = 30.0
    fused_head(model)
    with pytest.raises(ValueError, match="'softcap': 30.0.*does something else"):
        model(input_ids=ids(), from_hidden=next_logps(ids()))


def test_the_load_balancing_loss_is_handed_over():
    """trl#7009: a mixture of experts whose auxiliary loss was dropped."""
    model, input_ids = build("Qwen3Moe"), ids()
    expected = model(input_ids=input_ids, output_router_logits=True).aux_loss
    fused_head(model)
    got = model(
        input_ids=input_ids,
        output_router_logits=True,
        from_hidden=lambda hidden, head: head.aux_loss,
    )
    assert_near(got, expected, "aux_loss")
    assert model(input_ids=input_ids, from_hidden=lambda hidden, head: head.aux_loss) is None


def test_generation_and_the_signature_stay():
    model = llama().eval()
    signature, former = inspect.signature(model.forward), model.forward
    prompt = ids(1)
    before = model.generate(prompt, max_new_tokens=5, do_sample=False)
    with fused_head(model):
        assert inspect.signature(model.forward) == signature
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), before)
        assert "forward" not in vars(llama())
        assert type(model).forward is transformers.LlamaForCausalLM.forward
    assert model.forward == former
    pickle.dumps(model)


def test_handles_come_off_in_order():
    model = llama()
    first = fused_head(model)
    second = fused_head(model)
    with pytest.raises(RuntimeError, match="replaced again"):
        first.remove()
    second.remove()
    assert_same_as_logits(model)
    first.remove()
    assert "forward" not in vars(model)


def test_a_deep_copy_runs_itself():
    model = llama()
    fused_head(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
    assert_same_as_logits(other)


def test_a_deep_copy_with_accelerates_hook_runs_itself():
    """Its forward is a partial of the model, and no method that could be bound anew."""
    model, input_ids = llama(), ids()
    hooks = pytest.importorskip("accelerate.hooks", reason="needs accelerate (extra trl)")
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True))
    expected = own_logps(model, input_ids)
    fused_head(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert_near(own_logps(other, input_ids), expected, "logits of the copy")
    assert_same_as_logits(other)


def test_the_function_may_call_the_model():
    """For a reference's logits, or for another score of the same head."""
    model, input_ids = llama(), ids()
    expected = own_logps(model, input_ids)
    fused_head(model)

    def both(hidden, head):
        with torch.no_grad():
            plain = own_logps(model, input_ids)
            again = model(input_ids=input_ids, from_hidden=next_logps(input_ids))
        return next_logps(input_ids)(hidden, head), plain, again

    for got in model(input_ids=input_ids, from_hidden=both):
        assert_near(got, expected, "log-probabilities")


def test_the_model_is_whole_after_an_error():
    model, input_ids = llama(), ids()
    expected = own_logps(model, input_ids)
    fused_head(model)

    def fail(hidden, head):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model(input_ids=input_ids, from_hidden=fail)
    with pytest.raises(IndexError):
        model(input_ids=input_ids + V, from_hidden=next_logps(input_ids))
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert "forward" not in vars(model.lm_head)
    assert_near(own_logps(model, input_ids), expected, "after errors")


def test_hooks_of_the_head_run():
    """FSDP2 and ZeRO-3 gather the weight in such hooks."""
    model, input_ids = llama(), ids()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    fused_head(model)
    model(input_ids=input_ids, from_hidden=next_logps(input_ids))
    assert seen == [(2, 7, H)]


def test_autocast_is_the_models():
    model, input_ids = llama(), ids()
    fused_head(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(input_ids=input_ids, from_hidden=next_logps(input_ids))
    assert got.dtype == torch.float32
    assert not torch.equal(got, own_logps(model, input_ids))


def test_under_torch_compile():
    """The backbone is compiled, the head's exchange is not, and a new function recompiles none."""
    model, input_ids = llama(), ids()
    expected = own_logps(model, input_ids)
    fused_head(model)
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            got = compiled(input_ids=input_ids, from_hidden=next_logps(input_ids))
            assert_near(got, expected, "compiled")


class Doubled(torch.nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def doubled_here():
    head = torch.nn.Linear(H, V)
    own = head.forward
    head.forward = lambda hidden: 2 * own(hidden)
    return head


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (lambda: Doubled(H, V), "Doubled, whose own forward would be left out"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(H, V)), "must be a torch.nn.Linear"),
        (doubled_here, "has been replaced by doubled_here.<locals>.<lambda>"),
        (lambda: torch.nn.Linear(H, V, device="meta"), "on the meta device"),
    ],
)
def test_a_head_that_is_more_than_linear_is_refused(head, complaint):
    model = llama()
    model.lm_head = head()
    fused_head(model)
    with pytest.raises(ValueError, match=complaint):
        model(input_ids=ids(), from_hidden=next_logps(ids()))


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [({"labels": ids()}, "labels ask for"), ({"return_dict": False}, "a tuple, without names")],
)
def test_what_the_models_output_would_have_said_is_not_lost(inputs, complaint):
    """trl#7009: a loss asked of the model and dropped."""
    model = llama()
    fused_head(model)
    with pytest.raises(ValueError, match=complaint):
        model(input_ids=ids(), from_hidden=next_logps(ids()), **inputs)


def test_hidden_states_that_are_not_shifted_are_refused():
    """verl#2609: hidden states and ids of different lengths, cut by whoever came first."""
    model = llama()
    fused_head(model)
    with pytest.raises(ValueError, match="action_ids must have shape"):
        model(input_ids=ids(), from_hidden=lambda hidden, head: head.logprob(hidden, ids()[:, 1:]))


def test_a_second_opinion_on_the_models_modifiers_is_refused():
    model = build("Gemma2")
    fused_head(model)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'softcap'"):
        model(input_ids=ids(), from_hidden=next_logps(ids(), softcap=30.0))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(TypeError, match="must have an lm_head; got LlamaModel"):
        fused_head(llama().model)


def test_a_forward_that_never_calls_its_head_is_refused():
    model = llama()
    model.forward = lambda **inputs: None
    fused_head(model)
    with pytest.raises(ValueError, match="must call its lm_head once"):
        model(input_ids=ids(), from_hidden=next_logps(ids()))


ABSENT = """
import sys
sys.modules[{package!r}] = None
import ratio_kl
try:
    import ratio_kl.compat.{front}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("front", ["transformers", "trl"])
def test_without_its_package_the_extra_is_named(front):
    script = ABSENT.format(package=front, front=front)
    environment = os.environ | {"PYTHONPATH": str(Path(ratio_kl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert f"pip install {front}, or ratio_kl with its extra [{front}]" in done.stdout

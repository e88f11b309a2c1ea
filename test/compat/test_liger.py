"""Liger's GRPO loss: every option of Liger 0.8.5 on random inputs, against the package itself."""

import copy
import pickle
import random

import pytest
import torch

from compat.liger_cases import Batch, liger, their_loss
from compat.signatures import assert_same_call
from ratio_kl.compat.liger import LigerFusedLinearGRPOLoss, from_liger
from ratio_kl.config import LOSS_TYPES, RatioKLConfig
from support import BACKENDS, relative_error

TOLERANCE = 2e-5
"""Both are float32 and sum in another order."""
CASES = [
    (loss_type, level)
    for loss_type in LOSS_TYPES
    for level in ("token", "sequence")
    if level == "token" or loss_type not in ("cispo", "sapo", "vespo")  # refused by Liger
]


def drawn(seed, loss_type, level, **sizes):
    """(constructor's options, batch, call's options), each option at a random value."""
    pick = random.Random(seed).choice
    clips = loss_type not in ("cispo", "sapo", "vespo")
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": pick([0.0, 0.04, 0.5]),
        "use_ref_model": pick([True, False]),
        "chunk_size": pick([1, 2, 5]),
        "epsilon_low": pick([0.2, 0.1]),
        "epsilon_high": pick([0.2, 0.4]) if loss_type != "cispo" else pick([0.2, 1.3]),
        "max_completion_length": pick([9, 50]) if loss_type == "dr_grpo" else pick([None, 9]),
        "sapo_temperature_pos": pick([1.0, 0.7]),
        "sapo_temperature_neg": pick([1.05, 2.0]),
        "temperature": pick([1.0, 0.7, 1.3]),
        "delta": pick([None, 1.1, 1.6]) if clips else None,
        "use_bias_correction_kl": pick([False, True]),
        "vespo_k_pos": pick([2.0, 1.0]),
        "vespo_lambda_pos": pick([3.0, 0.5]),
        "vespo_k_neg": pick([3.0, 1.5]),
        "vespo_lambda_neg": pick([2.0, 0.0]),
    }
    batch = Batch(full=loss_type == "luspo", **sizes)  # luspo: Liger lets padding in (below)
    call = {
        "bias": pick([None, batch.bias]),
        "old_per_token_logps": pick([None, batch.old, batch.old]),
        "vllm_is_ratio": pick([None, batch.is_ratio, batch.is_ratio[:, 0], batch.is_ratio[:, :1]]),
        "num_items_in_batch": pick([None, 57, torch.tensor(57), torch.tensor(57.0)]),
    }
    references = [
        {"ref_per_token_logps": batch.ref},
        {"ref_per_token_logps": batch.ref, "ref_weight": batch.ref_weight},
        {"ref_input": batch.ref_hidden, "ref_weight": batch.ref_weight},
    ]
    if call["bias"] is not None:
        references[2]["ref_bias"] = pick([None, batch.ref_bias])
    call |= pick(references if options["use_ref_model"] else [{}, *references])
    return options, batch, call


def outcome(loss_fn, batch, call):
    """Loss, metrics, and the gradients of 1.7 times the loss."""
    leaves = [x for x in (batch.hidden, batch.weight, call.get("bias")) if x is not None]
    loss, metrics = loss_fn(*batch.required, **call)
    return loss, metrics, torch.autograd.grad(1.7 * loss, leaves)


def assert_same(ours, theirs, tolerance=TOLERANCE, loss_size=0.0):
    (our_loss, our_metrics, our_grads), (their_loss, their_metrics, their_grads) = ours, theirs
    assert isinstance(our_metrics, tuple)
    size = max(abs(their_loss.item()), loss_size)
    assert abs(our_loss.item() - their_loss.item()) <= tolerance * size
    for mine, other in zip(our_metrics, their_metrics, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert not mine.requires_grad
        assert mine.item() == pytest.approx(other.item(), rel=tolerance, abs=1e-6)
    for mine, other in zip(our_grads, their_grads, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert relative_error(mine, other) <= tolerance


def test_the_signatures_are_ligers():
    theirs = liger.LigerFusedLinearGRPOLoss
    assert_same_call(LigerFusedLinearGRPOLoss, theirs)
    assert_same_call(LigerFusedLinearGRPOLoss.forward, theirs.forward)


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_it_equals_liger(loss_type, level):
    """24 random settings of all options: each pair of values meets in one with near certainty."""
    for seed in range(24):
        options, batch, call = drawn(f"{seed}{loss_type}{level}", loss_type, level)
        theirs = outcome(their_loss(**options), batch, call)
        # Terms of both signs cancel in the loss; their size is that of the advantages.
        assert_same(outcome(LigerFusedLinearGRPOLoss(**options), batch, call), theirs, loss_size=1)


def test_more_columns_than_a_chunk_of_liger():
    batch = Batch(V=5000)
    call = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
    theirs = outcome(their_loss(), batch, call)
    assert_same(outcome(LigerFusedLinearGRPOLoss(), batch, call), theirs, loss_size=1)


def test_a_frozen_head_and_a_detached_input():
    batch = Batch()
    batch.weight.requires_grad_(False)
    theirs = their_loss(use_ref_model=False)(*batch.required)[0]
    ours = LigerFusedLinearGRPOLoss(use_ref_model=False)(*batch.required)[0]
    grads = [torch.autograd.grad(loss, batch.hidden)[0] for loss in (ours, theirs)]
    assert relative_error(*grads) <= TOLERANCE
    with torch.no_grad():
        assert not LigerFusedLinearGRPOLoss(use_ref_model=False)(*batch.required)[0].requires_grad


def test_the_table_of_overrides():
    """What a config with no option differs in, and gradients made in forward."""
    ours, plain = LigerFusedLinearGRPOLoss(), RatioKLConfig()
    assert {name for name in vars(plain) if getattr(plain, name) != getattr(ours.config, name)} == {
        "beta",
        "epsilon_high",
    }
    assert ours.loss_fn.runtime.grads == "forward"
    batch = Batch()
    loss, _ = ours(*batch.required, ref_per_token_logps=batch.ref)
    expected = torch.autograd.grad(loss, batch.weight, retain_graph=True)[0].clone()
    with torch.no_grad():
        batch.hidden.fill_(torch.nan)
    assert torch.equal(torch.autograd.grad(loss, batch.weight)[0], expected)


def test_from_liger():
    """Every option at a value that is not its default."""
    options = {
        "beta": 0.1,
        "use_ref_model": False,
        "chunk_size": 4,
        "epsilon_low": 0.1,
        "epsilon_high": 0.3,
        "loss_type": "grpo",
        "max_completion_length": 9,
        "importance_sampling_level": "sequence",
        "sapo_temperature_pos": 2.0,
        "sapo_temperature_neg": 3.0,
        "temperature": 0.7,
        "delta": 1.5,
        "use_bias_correction_kl": True,
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 1.1,
        "vespo_k_neg": 1.2,
        "vespo_lambda_neg": 1.3,
    }
    theirs = their_loss(**options)
    ours = from_liger(theirs, backend="torch", chunk_bytes=10_000, process_group="local")
    assert {name: getattr(ours, name) for name in options} == options
    assert ours.compiled is False
    assert ours.loss_fn.runtime.process_group == "local"
    batch = Batch()
    call = {"old_per_token_logps": batch.old}
    assert_same(outcome(ours, batch, call), outcome(theirs, batch, call), loss_size=1)
    with pytest.raises(TypeError, match="got a Linear without compiled, use_ref_model"):
        from_liger(torch.nn.Linear(2, 2))


def test_an_option_set_later_takes_effect():
    batch = Batch()
    call = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
    ours, theirs = LigerFusedLinearGRPOLoss(), their_loss()
    for name, value in {"beta": 0.3, "temperature": 0.7, "use_ref_model": False}.items():
        setattr(ours, name, value)
        setattr(theirs, name, value)
        assert getattr(ours, name) == value
        assert_same(outcome(ours, batch, call), outcome(theirs, batch, call), loss_size=1)
    with pytest.raises(ValueError, match="beta"):
        ours.beta = -1.0
    assert ours.beta == 0.3
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied.config == ours.config
        assert torch.equal(copied(*batch.required)[0], ours(*batch.required)[0])


def test_references_too_many_and_too_few():
    batch = Batch()
    loss_fn = LigerFusedLinearGRPOLoss()
    with pytest.raises(ValueError, match="needs ref_per_token_logps or ref_input; got neither"):
        loss_fn(*batch.required)
    both = {"ref_per_token_logps": batch.ref, "ref_input": batch.ref_hidden}
    with pytest.warns(UserWarning, match="ref_per_token_logps is used"):
        loss, _ = loss_fn(*batch.required, **both)
    assert torch.equal(loss, loss_fn(*batch.required, ref_per_token_logps=batch.ref)[0])


@pytest.mark.parametrize("name", ["bias", "ref_weight"])
def test_a_head_that_is_no_tensor(name):
    """A reference with a head of its own gets a bias of zeros, made of both."""
    batch = Batch()
    given = {"bias": torch.zeros(3), "ref_weight": torch.zeros(3, 2), "ref_input": batch.ref_hidden}
    with pytest.raises(TypeError, match=f"{name} must be a tensor; got 'x' of type str"):
        LigerFusedLinearGRPOLoss()(*batch.required, **(given | {name: "x"}))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under Triton's interpreter
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_compiles_as_one_graph(backend):
    """Liger's own does not. Gradients made in forward cannot be traced, so they are not made."""
    options = {"backend": backend, "grads": "backward", "importance_sampling_level": "sequence"}
    loss_fn = LigerFusedLinearGRPOLoss(**options)
    batch = Batch()
    call = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
    eager = outcome(LigerFusedLinearGRPOLoss(**options), batch, call)
    call["ref_input"] = batch.ref_hidden  # not used, and without a warning that nothing can trace
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    assert_same(outcome(compiled, batch, call), eager, loss_size=1)


# torch's own, while it builds guards on what a graph break left.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_with_graph_breaks_the_gradients_are_made_in_forward():
    batch = Batch()
    loss_fn = LigerFusedLinearGRPOLoss(use_ref_model=False)
    eager = outcome(loss_fn, batch, {})
    torch._dynamo.reset()
    assert_same(outcome(torch.compile(loss_fn, backend="aot_eager"), batch, {}), eager)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_it_equals_liger_on_the_gpu(loss_type, level):
    """6 x 100 tokens, 5000 columns. Two cases with Liger's loss compiled, as it is by default."""
    torch._dynamo.reset()
    batch = Batch(T=100, H=256, V=5000, device="cuda", full=loss_type == "luspo")
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    options["max_completion_length"] = 128
    call = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
    compiled = (loss_type, level) in (("dapo", "token"), ("grpo", "sequence"))
    theirs = outcome(liger.LigerFusedLinearGRPOLoss(compiled=compiled, **options), batch, call)
    assert_same(outcome(LigerFusedLinearGRPOLoss(**options), batch, call), theirs, 1e-4, 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_it_equals_liger_on_the_gpu_at_any_options(loss_type, level):
    """6 random settings of all options at 6 x 100 tokens and 5000 columns."""
    for seed in range(6):
        sizes = {"T": 100, "H": 256, "V": 5000, "device": "cuda"}
        options, batch, call = drawn(f"{seed}{loss_type}{level}", loss_type, level, **sizes)
        theirs = outcome(liger.LigerFusedLinearGRPOLoss(compiled=False, **options), batch, call)
        assert_same(outcome(LigerFusedLinearGRPOLoss(**options), batch, call), theirs, 1e-4, 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_bfloat16_is_at_least_as_exact_on_the_gpu():
    batch = Batch(T=100, H=256, V=5000, dtype=torch.bfloat16, device="cuda")
    call = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
    wide = batch.in_float64()
    truth = outcome(LigerFusedLinearGRPOLoss(backend="torch"), wide, call)
    theirs = outcome(liger.LigerFusedLinearGRPOLoss(), batch, call)
    ours = outcome(LigerFusedLinearGRPOLoss(), batch, call)
    assert abs(ours[0] - truth[0]) <= abs(theirs[0] - truth[0]) + 1e-5
    for mine, other, true in zip(ours[2], theirs[2], truth[2], strict=True):
        assert relative_error(mine, true) <= 1.5 * relative_error(other, true)

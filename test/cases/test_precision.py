"""Faults that users of such losses have met: precision and mixed dtypes."""

from itertools import product

import pytest
import torch

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.config import RatioKLConfig
from ratio_kl.reference import reference_logprob
from support import assert_close, problem, relative_error, run, run_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rounding of a leaf's gradient to its own dtype: one unit in the last place of the norm.
UNIT = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def config_of(**options) -> RatioKLConfig:
    return RatioKLConfig(loss_type="grpo", beta=0.1, entropy_coef=0.01, **options)


def mixed(hidden_dtype: torch.dtype, weight_dtype: torch.dtype):
    """A problem whose hidden and weight are numbers of those dtypes, and the same in float64.

    One row block of 6 x 16 tokens, V = 150: several tiles at the smallest chunk.
    """
    given = problem(1, config_of(), bias=True, poison=False)
    hidden, weight = given.inputs[0].to(hidden_dtype), given.inputs[1].to(weight_dtype)
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    exact = given.with_inputs(
        hidden=hidden.detach().double().requires_grad_(),
        weight=weight.detach().double().requires_grad_(),
    )
    return given.with_inputs(hidden=hidden, weight=weight), exact


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(("hidden", "weight"), list(product([*DTYPES, torch.float64], repeat=2)))
def test_a18_any_mix_of_hidden_and_weight(hidden, weight, autocast: bool) -> None:
    """ "mat1 and mat2 must have the same dtype", often in backward only (Liger-Kernel#305, #501).

    Also linkedin/Liger-Kernel#501, hiyouga/LlamaFactory#5583, huggingface/trl#6980.
    """
    given, exact = mixed(hidden, weight)
    expected = run_reference(config_of(), exact)
    loss_fn = FusedLinearRatioKLLoss(config_of(), chunk_bytes=1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = loss_fn(*given.inputs, **given.options)
    # Backward outside of autocast, as it is usually called.
    grads = torch.autograd.grad(out.loss, list(given.leaves.values()))
    double = torch.float64 in (hidden, weight)
    assert out.logps.dtype == (torch.float64 if double else torch.float32)
    # Autocast may multiply in bfloat16: 8 bits, over a width of 8.
    rounded = autocast and not double
    bound = 2e-2 if rounded else (1e-12 if double else 1e-5)
    assert_close(out.logps, expected.outputs["logps"], bound, "logps")
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=bound, abs=bound)
    for (name, leaf), grad in zip(given.leaves.items(), grads, strict=True):
        assert grad.dtype == leaf.dtype, name
        allowed = max(UNIT[leaf.dtype], 10 * bound)
        assert relative_error(grad, expected.grads[name]) <= allowed, name


SIDE = {
    "log-probs": [torch.bfloat16, torch.float64, torch.float32, torch.float16],
    "advantages": [torch.int64, torch.float64, torch.int8, torch.bfloat16],
    "mask": [torch.bool, torch.uint8, torch.int64, torch.float32],
}


@pytest.mark.parametrize("dtypes", list(zip(*SIDE.values(), strict=True)), ids=str)
@pytest.mark.parametrize("leaf", DTYPES)
def test_a18_dtypes_of_everything_else(leaf: torch.dtype, dtypes) -> None:
    """huggingface/trl#6980: whole advantages, any mask, any log-probs; the numbers are the same."""
    logps_dtype, advantages_dtype, mask_dtype = dtypes
    given = problem(2, config_of(), dtype=leaf, poison=False)
    logps = {name: given.options[name].to(logps_dtype) for name in ("old_logps", "ref_logps")}
    A = torch.tensor([-1.0, 2.0, -3.0, 1.0, 0.0, 5.0])
    typed = given.with_inputs(
        advantages=A.to(advantages_dtype), attention_mask=given.active.to(mask_dtype)
    )
    plain = given.with_inputs(advantages=A, attention_mask=given.active)
    loss_fn = FusedLinearRatioKLLoss(config_of())
    actual = run(loss_fn, typed.given(**logps))
    expected = run(loss_fn, plain.given(**{name: x.float() for name, x in logps.items()}))
    assert actual.loss.dtype == torch.float32
    # float64 log-probs are rounded to the float32 of the objective, here as there.
    assert torch.equal(actual.loss, expected.loss)
    for name, grad in actual.grads.items():
        assert grad.dtype == leaf
        assert torch.equal(grad, expected.grads[name])


@pytest.mark.parametrize("weight_rows", [1, 300])
def test_a19_gradients_are_summed_in_float32(weight_rows: int) -> None:
    """W.grad rounded to bf16 after every chunk (Liger-Kernel#512, xtuner#1747, OLMo-core#370).

    16384 equal rows in tiles of 64: a bfloat16 accumulator stops after 256 additions. With 300
    rows of weight the vocabulary is tiled too.
    """
    N, H, V = 16384, 4, weight_rows + 1
    hidden = torch.ones(N, H, dtype=torch.bfloat16).requires_grad_()
    weight = torch.zeros(V, H, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(V, dtype=torch.bfloat16).requires_grad_()
    ids = torch.zeros(N, dtype=torch.int64)
    logps = linear_logprob(hidden, weight, ids, bias=bias, chunk_bytes=1).logps
    d_weight, d_bias = torch.autograd.grad(logps.sum(), [weight, bias])
    expected = torch.full((V,), -N / V, dtype=torch.float64)
    expected[0] += N
    assert_close(d_weight, expected[:, None].expand(V, H), 2.0**-8, "weight")
    assert_close(d_bias, expected, 2.0**-8, "bias")


def test_a20_logits_beyond_the_range_of_float16() -> None:
    """inf or NaN in float16 RL where logits are stored in float16 (unslothai/unsloth-zoo#598).

    H = 1024, hidden 16, weight +-16: logits are +-262144.
    """
    hidden = torch.full((2, 1024), 16, dtype=torch.float16).requires_grad_()
    weight = torch.full((5, 1024), 16, dtype=torch.float16)
    weight[1::2] = -16
    weight.requires_grad_()
    ids = torch.tensor([0, 1])
    out = linear_logprob(hidden, weight, ids, return_entropy=True)
    logps, entropies = reference_logprob(hidden.double(), weight.double(), ids)
    torch.testing.assert_close(out.logps.double(), logps, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.entropies.double(), entropies, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(out.logps[0] + out.entropies.sum(), [hidden, weight])
    assert all(grad.isfinite().all() for grad in grads)


def test_a21_float32_is_multiplied_in_float32() -> None:
    """float32 worse than float16 where products use TF32 (triton-lang/triton#6192, #2042).

    H = 4096, V = 1000 as reported; TF32 would show 1e-2 and more.
    """
    hidden, weight = torch.randn(4, 4096), torch.randn(1000, 4096)
    ids = torch.randint(0, 1000, (4,))
    out = linear_logprob(hidden, weight, ids)
    exact = reference_logprob(hidden.double(), weight.double(), ids)[0]
    torch.testing.assert_close(out.logps.double(), exact, rtol=0, atol=1e-4)

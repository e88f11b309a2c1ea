"""RL-Kernel's calls. It is not on PyPI: its contract is its documents', written out here."""

import pytest
import torch

from compat.signatures import assert_same_call
from ratio_kl.compat.rl_kernel import linear_logp, ratio_kl
from support import BACKENDS, FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_close


def documented_linear_logp(
    hidden,
    lm_head_weight,
    target_ids,
    bias=None,
    *,
    tp_group=None,
    vocab_start_index=0,
    global_vocab_size=None,
):
    """The signature of docs/operators/linear-logp.md, and its reference semantics."""
    logits = torch.nn.functional.linear(hidden, lm_head_weight, bias)
    return torch.log_softmax(logits, dim=-1).gather(-1, target_ids[..., None])[..., 0]


def documented_ratio_kl(policy_logits, ref_logits, action_ids, attention_mask, old_logps):
    """The signature and the reference semantics of docs/operators/ratio-kl.md."""
    mask = attention_mask.bool()
    policy = policy_logits.float().log_softmax(-1).gather(-1, action_ids[..., None])[..., 0]
    reference = ref_logits.float().log_softmax(-1).gather(-1, action_ids[..., None])[..., 0]
    delta = (policy - old_logps).masked_fill(~mask, 0.0)
    diff = (reference.detach() - policy).masked_fill(~mask, 0.0)
    return delta.exp(), diff.exp() - diff - 1.0


@pytest.mark.parametrize(
    ("ours", "theirs"), [(linear_logp, documented_linear_logp), (ratio_kl, documented_ratio_kl)]
)
def test_the_signature_is_rl_kernels(ours, theirs):
    assert_same_call(ours, theirs)


@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_logp(shape, with_bias):
    """70 columns: one tile and a tail."""
    hidden = torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(70, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(70, dtype=torch.float64, requires_grad=True) if with_bias else None
    ids = torch.randint(70, shape)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    grad = torch.randn(shape, dtype=torch.float64)
    ours = linear_logp(hidden, weight, ids, bias, global_vocab_size=70)
    theirs = documented_linear_logp(hidden, weight, ids, bias)
    assert_close(ours, theirs, FLOAT64_TOLERANCE, "logp")
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, grad),
        torch.autograd.grad(theirs, leaves, grad),
        strict=True,
    ):
        assert_close(mine, other, FLOAT64_TOLERANCE, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logp_is_float32_of_unrounded_logits(dtype):
    """As its fused backends; its PyTorch one rounds the logits to the inputs' dtype first."""
    hidden, weight = torch.randn(10, 8).to(dtype), torch.randn(70, 8).to(dtype)
    ids = torch.randint(70, (10,))
    ours = linear_logp(hidden, weight, ids)
    assert ours.dtype == torch.float32
    true = documented_linear_logp(hidden.double(), weight.double(), ids)
    assert_close(ours, true, FLOAT32_TOLERANCE, "logp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ratio_kl(dtype):
    """Both outputs and the gradient, with inactive rows in between."""
    logits, reference = (torch.randn(2, 5, 70).to(dtype) for _ in range(2))
    logits.requires_grad_()
    ids, mask = torch.randint(70, (2, 5)), torch.rand(2, 5) < 0.6
    given = (logits, reference, ids, mask.long(), torch.randn(2, 5) - 4)
    ours, theirs = ratio_kl(*given), documented_ratio_kl(*given)
    total = {id(pair): pair[0].sum() + 0.3 * pair[1].sum() for pair in (ours, theirs)}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, other, FLOAT32_TOLERANCE, "output")
    mine, other = (torch.autograd.grad(total[id(pair)], logits)[0] for pair in (ours, theirs))
    assert_close(mine, other, 2e-3 if dtype == torch.float16 else FLOAT32_TOLERANCE, "gradient")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_start_index": 35}, "vocab_start_index must be 0 without a tp_group; got 35"),
        ({"lm_head_weight": torch.tensor(1.0)}, r"lm_head_weight must have shape \[V, D\]; got"),
        ({"global_vocab_size": 140}, "rows of the whole head, 70; got 140"),
        ({"target_ids": torch.full((10,), 70)}, r"must lie in \[0, 70\)"),
        ({"target_ids": torch.zeros(2, 5, dtype=torch.int64)}, "must have shape"),
    ],
)
def test_what_it_refuses(changes, complaint):
    given = {
        "hidden": torch.randn(10, 8),
        "lm_head_weight": torch.randn(70, 8),
        "target_ids": torch.randint(70, (10,)),
    }
    with pytest.raises(ValueError, match=complaint):
        linear_logp(**(given | changes))


@pytest.mark.parametrize("name", ["vocab_start_index", "global_vocab_size"])
@pytest.mark.parametrize("value", ["0", torch.zeros(2)])
def test_rows_are_counted_in_ints(name, value):
    given = torch.randn(10, 8), torch.randn(70, 8), torch.randint(70, (10,))
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        linear_logp(*given, **{name: value})


def test_a_group_must_be_one():
    with pytest.raises(TypeError, match="tp_group must be"):
        linear_logp(
            torch.randn(3, 8), torch.randn(70, 8), torch.zeros(3, dtype=torch.int64), tp_group=3
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under Triton's interpreter
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_they_compile_as_one_graph(backend):
    hidden, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(70, 8)
    ids, mask = torch.randint(70, (2, 5)), torch.rand(2, 5) < 0.6

    def call(hidden, weight, ids, mask):
        logps = linear_logp(hidden, weight, ids, backend=backend)
        return logps, *ratio_kl(hidden, hidden, ids % 8, mask, logps, backend=backend)

    eager = call(hidden, weight, ids, mask)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden, weight, ids, mask)
    for mine, other in zip(compiled, eager, strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "output")
    mine, other = (
        torch.autograd.grad(sum(map(torch.sum, out)), hidden) for out in (compiled, eager)
    )
    assert_close(mine[0], other[0], FLOAT32_TOLERANCE, "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu(dtype):
    """300 x 4096 logits, several tiles each way: RL-Kernel's own bound is 1e-3 of the float32."""
    hidden = torch.randn(2, 150, 256, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(4096, 256, device="cuda") / 16).to(dtype)
    ids = torch.randint(4096, (2, 150), device="cuda")
    ours = linear_logp(hidden, weight, ids)
    true = documented_linear_logp(hidden.double(), weight.double(), ids)
    assert ours.dtype == torch.float32
    assert (ours - true).abs().max() < 5e-5
    logits = (hidden.detach() @ weight.T).requires_grad_()
    mask = torch.rand(2, 150, device="cuda") < 0.6
    given = (logits, logits.detach() * 1.01, ids, mask, ours.detach() - 0.1)
    for mine, other in zip(ratio_kl(*given), documented_ratio_kl(*given), strict=True):
        # A penalty of 4e-4 is d^2 / 2 of differences of log-probabilities of size 8.
        assert_close(mine, other, 1e-3, "output")

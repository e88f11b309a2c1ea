"""Faults that users of such losses have met: gradients that are wrong without an error."""

import pytest
import torch
from torch import Tensor

from cases.meter import metered
from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.config import RatioKLConfig
from ratio_kl.reference import reference_logprob
from support import BACKENDS, assert_close, problem, run

FLOAT64 = 1e-12
CHUNKS = [1, 2**28]  # many tiles, and one


def leaves_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("size", [(2, 4, 10, 15), (9, 16, 10, 150)])
def test_a12_each_token_has_its_own_incoming_gradient(size, chunk_bytes: int) -> None:
    """Gradients summed over tokens before the weights came (linkedin/Liger-Kernel#678, #968).

    The reported size, and one that is cut into tiles both ways.
    """
    B, T, H, V = size
    leaves = leaves_of((B, T, H), (V, H), (V,))
    ids = torch.randint(0, V, (B, T))
    weights = torch.arange(B * T).view(B, T).double()
    ours = linear_logprob(
        leaves[0], leaves[1], ids, bias=leaves[2], return_entropy=True, chunk_bytes=chunk_bytes
    )
    theirs = reference_logprob(leaves[0], leaves[1], ids, bias=leaves[2])
    for index, name in enumerate(("logps", "entropies")):
        actual = torch.autograd.grad((ours[index] * weights).sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad((theirs[index] * weights).sum(), leaves, retain_graph=True)
        for leaf, a, b in zip(("hidden", "weight", "bias"), actual, expected, strict=True):
            assert_close(a, b, FLOAT64, f"{name}: {leaf}.grad")
        assert not actual[0][0, 0].any(), "the first token's weight is 0"


def test_a12_the_loss_can_be_scaled() -> None:
    """linkedin/Liger-Kernel#968: loss * 3.7 has 3.7 times the gradient."""
    config = RatioKLConfig(beta=0.1, entropy_coef=0.01)
    given = problem(2, config, bias=True)
    plain = run(FusedLinearRatioKLLoss(config), given)

    def scaled(*inputs, **options):
        out = FusedLinearRatioKLLoss(config)(*inputs, **options)
        return out._replace(loss=out.loss * 3.7)

    for name, grad in run(scaled, given).grads.items():
        assert_close(grad, 3.7 * plain.grads[name], FLOAT64, name)


SELECTIONS = {
    "every second token": lambda x: x[:, ::2].sum(),
    "transposed": lambda x: x.t()[1:3].sum(),
    "one token": lambda x: x[1, 2] * 3,
    "expanded": lambda x: x.sum(),
    "strided": lambda x: (x.flatten() * torch.arange(16.0, dtype=x.dtype)[::2]).sum(),
    "column weights": lambda x: (x * torch.arange(4.0, dtype=x.dtype).expand(2, 4)).sum(),
    "reversed": lambda x: (x.flip(1) * torch.arange(4.0, dtype=x.dtype)).sum(),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS.keys())
def test_a13_incoming_gradients_of_any_stride(select) -> None:
    """Wrong gradients when downstream masks or slices (verl-project/verl#6960)."""
    leaves = leaves_of((2, 4, 10), (15, 10))
    ids = torch.randint(0, 15, (2, 4))
    ours = linear_logprob(*leaves, ids, return_entropy=True)
    theirs = reference_logprob(*leaves, ids)
    for a, b in zip(ours[:2], theirs, strict=True):
        actual = torch.autograd.grad(select(a), leaves, retain_graph=True)
        expected = torch.autograd.grad(select(b), leaves, retain_graph=True)
        for leaf, x, y in zip(("hidden", "weight"), actual, expected, strict=True):
            assert_close(x, y, FLOAT64, leaf)


LAYOUTS = {
    "transposed [T, B, H]": lambda x: x.transpose(0, 1),
    "all but the last": lambda x: x[:, :-1],
    "every second": lambda x: x[::2],
    "transposed features": lambda x: x.transpose(1, 2),
    "expanded": lambda x: x[:1].expand(3, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_a13_inputs_of_any_stride(layout, mask_dtype: torch.dtype) -> None:
    """verl-project/verl#6960 for non-contiguous hidden, ids and masks."""
    base, weight = leaves_of((4, 6, 6), (6, 15))
    hidden = layout(base)
    ids = layout(torch.randint(0, 15, (4, 6, 6)))[..., 0]
    mask = (layout(torch.rand(4, 6, 6))[..., 1] > 0.3).to(mask_dtype)
    assert not (hidden.is_contiguous() and ids.is_contiguous())
    ours = linear_logprob(hidden, weight.t(), ids, mask)
    expected = reference_logprob(hidden, weight.t(), ids, mask)[0]
    assert_close(ours.logps, expected, FLOAT64, "logps")
    actual = torch.autograd.grad(ours.logps.square().sum(), [base, weight])
    for a, b in zip(
        actual, torch.autograd.grad(expected.square().sum(), [base, weight]), strict=True
    ):
        assert_close(a, b, FLOAT64, "gradient")


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
@pytest.mark.parametrize("grads", ["backward", "forward"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of NaN selected away
def test_a14_a_second_backward_gives_the_same(backend, grads, frozen, chunk_bytes: int) -> None:
    """retain_graph: an error, or gradients scaled twice (Dao-AILab/quack#209)."""
    config = RatioKLConfig(beta=0.1, entropy_coef=0.01)
    # Two tiles both ways; Triton takes no float64.
    given = problem(3, config, V=70, dtype=torch.float32)
    loss_fn = FusedLinearRatioKLLoss(config, backend=backend, grads=grads, chunk_bytes=chunk_bytes)
    leaves = [x for name, x in given.leaves.items() if name != frozen]
    if frozen:
        given.leaves[frozen].requires_grad_(False)
    out = loss_fn(*given.inputs, **given.options)
    first = torch.autograd.grad(out.loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(out.loss * 2, leaves, retain_graph=True)
    third = torch.autograd.grad(out.loss, leaves)
    for a, b, c, d in zip(first, kept, second, third, strict=True):
        assert a.any()
        assert torch.equal(a, b)
        assert torch.equal(c, 2 * a)
        assert torch.equal(d, a)


def test_a14_double_backward_is_refused() -> None:
    """Dao-AILab/quack#209: create_graph is right or a clear error, never a silent number."""
    hidden, weight = leaves_of((2, 4, 10), (15, 10))
    ids = torch.randint(0, 15, (2, 4))
    logps = linear_logprob(hidden, weight, ids).logps
    grads = torch.autograd.grad(logps.sum(), [hidden, weight], create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="no double backward"):
            torch.autograd.grad(grad.square().sum(), [hidden], retain_graph=True)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a15_no_input_is_written(chunk_bytes: int) -> None:
    """Gradient written into the input's storage (linkedin/Liger-Kernel#272, #1251)."""
    config = RatioKLConfig(beta=0.1, entropy_coef=0.01, top_entropy_quantile=0.5)
    given = problem(
        4, config, bias=True, reference="hidden", sampling_ratio="token", temperature="token"
    )
    given = given.given(num_items_in_batch=torch.tensor(50))
    x = given.hidden.detach().clone().requires_grad_()
    hidden = torch.tanh(x)  # saves its output for backward
    given = given.with_inputs(hidden=hidden)
    tensors = [t for t in (*given.inputs, *given.options.values()) if isinstance(t, Tensor)]
    before = [t.detach().clone() for t in tensors]

    def unchanged() -> bool:
        pairs = zip(tensors, before, strict=True)
        return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)

    out = FusedLinearRatioKLLoss(config, chunk_bytes=chunk_bytes)(*given.inputs, **given.options)
    assert unchanged()
    (d_hidden,) = torch.autograd.grad(out.loss, hidden, retain_graph=True)
    out.loss.backward()
    assert unchanged()
    slope = torch.where(given.active[..., None], 1 - torch.tanh(x.detach()).square(), 0)
    assert_close(torch.where(given.active[..., None], x.grad, 0), d_hidden * slope, FLOAT64, "x")


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a16_an_entropy_bonus_alone_trains(chunk_bytes: int) -> None:
    """The entropy's gradient accepted and dropped (huggingface/trl#6625)."""
    leaves = leaves_of((9, 16, 10), (150, 10), (150,))
    ids = torch.randint(0, 150, (9, 16))
    ours = linear_logprob(
        leaves[0], leaves[1], ids, bias=leaves[2], return_entropy=True, chunk_bytes=chunk_bytes
    )
    theirs = reference_logprob(leaves[0], leaves[1], ids, bias=leaves[2])[1]
    actual = torch.autograd.grad(-0.01 * ours.entropies.mean(), leaves)
    expected = torch.autograd.grad(-0.01 * theirs.mean(), leaves)
    for name, a, b in zip(("hidden", "weight", "bias"), actual, expected, strict=True):
        assert_close(a, b, FLOAT64, name)


def test_a16_no_entropy_work_for_logps_alone() -> None:
    """huggingface/trl#6625, the maintainer's wish: no entropy, or no gradient of it, no work."""
    hidden, weight = leaves_of((64, 10), (640, 10))
    ids = torch.randint(0, 640, (64,))

    def operations(return_entropy: bool, *used: str) -> tuple[int, int]:
        with metered() as meter:
            out = linear_logprob(hidden, weight, ids, return_entropy=return_entropy, chunk_bytes=1)
            forward = len(meter.shapes)
            torch.autograd.grad(sum(getattr(out, x).sum() for x in used), [hidden, weight])
        return forward, len(meter.shapes) - forward

    assert linear_logprob(hidden, weight, ids).entropies.numel() == 0
    plain, with_entropy = operations(False, "logps"), operations(True, "logps")
    assert plain[0] < with_entropy[0]
    assert plain[1] == with_entropy[1]
    assert with_entropy[1] < operations(True, "logps", "entropies")[1]


@pytest.mark.parametrize("config", [RatioKLConfig(), RatioKLConfig(beta=0.1, entropy_coef=0.1)])
def test_a17_nothing_is_scaled_by_the_number_of_chunks(config: RatioKLConfig) -> None:
    """Loss scaled by the number of chunks: sums of chunk means (NVIDIA-NeMo/Automodel#3804).

    T=4096, V=64, H=8 as reported. A budget of b tokens is b * 64 logits of two buffers.
    """
    given = problem(6, config, B=1, T=4096, H=8, V=64, dtype=torch.float32, bias=True)
    results = [
        run(FusedLinearRatioKLLoss(config, chunk_bytes=tokens * 64 * 2 * 4), given)
        for tokens in (1, 7, 32, 1024, 4095, 4096, 10**6)
    ]
    for result in results:
        assert result.outputs["logps"].shape == (1, 4096)
        assert_close(result.loss, results[-1].loss, 1e-5, "loss")
        for name, grad in result.grads.items():
            assert_close(grad, results[-1].grads[name], 1e-5, name)

"""What only a GPU shows: bitwise invariance at real sizes, offsets past 2^31, memory, capture."""

import warnings

import pytest
import torch

from kernels.head_cases import (
    ALL,
    MODIFIERS,
    Case,
    assert_right,
    expected,
    make_case,
    relative_error,
    run,
    with_head,
)
from ratio_kl.ops.contract import Needs, Saved, Want
from ratio_kl.ops.triton import linear as triton_backend

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

HIDDEN_AND_WEIGHT = Needs(hidden=True, weight=True, bias=False)


def rows_of(case: Case, rows: torch.Tensor) -> Case:
    """The case's rows in another order, or some of them."""
    head = case.head
    temperature = head.inverse_temperature
    return with_head(
        case,
        hidden=head.hidden[rows],
        inverse_temperature=None if temperature is None else temperature[rows],
    )._replace(ids=case.ids[rows])


def score(case: Case) -> torch.Tensor:
    """logps, entropies, max, log_sum: [4, N]."""
    scores = triton_backend.forward(case.head, case.ids, case.mask, want=Want(True))
    return torch.stack(scores[:4])


@pytest.fixture(scope="module", params=[(), MODIFIERS], ids=["plain", "modified"])
def large(request):
    """8192 rows, as a batch; 33 333 columns: 131 tiles, the last one odd."""
    return make_case(
        8192, 33_333, 512, modifiers=request.param, dtype=torch.bfloat16, device="cuda"
    )


def test_a48_a_row_is_bitwise_the_same_in_any_batch(large):
    """Alone, in any N, order, mask and chunk_bytes (RL-Kernel#329, trl#4303)."""
    whole = score(large)
    assert whole.isfinite().all()
    assert (whole[0] <= 0).all()
    for N in (1, 17, 256, 4096):
        rows = torch.randperm(8192, device="cuda")[:N]
        assert torch.equal(score(rows_of(large, rows)), whole[:, rows]), N
    mask = torch.rand(8192, device="cuda") < 0.3
    assert torch.equal(score(large._replace(mask=mask)), whole * mask)
    for chunk_bytes in (1, 3_000_000):
        assert torch.equal(score(with_head(large, chunk_bytes=chunk_bytes)), whole)
        cut = with_head(large._replace(mask=mask), chunk_bytes=chunk_bytes)
        assert torch.equal(score(cut), whole * mask)
    logps = triton_backend.forward(large.head, large.ids, None, want=Want(False)).logps
    assert torch.equal(logps, whole[0])


def test_descriptors_and_pointers_agree_bitwise(large):
    """Rows moved off the 16-byte grid, so that they are loaded through pointers."""
    aligned = rows_of(large, torch.arange(300, device="cuda"))
    grads = [g[:300].contiguous() for g in (large.grad_logps, large.grad_entropies)]
    aligned = aligned._replace(grad_logps=grads[0], grad_entropies=grads[1])

    def moved(matrix):
        space = torch.empty(matrix.numel() + 1, dtype=matrix.dtype, device="cuda")
        return space[1:].view(matrix.shape).copy_(matrix)

    reference = run(aligned)
    hidden, weight = moved(aligned.head.hidden), moved(aligned.head.weight)
    for changes in ({"hidden": hidden}, {"weight": weight}, {"hidden": hidden, "weight": weight}):
        scores, _ = run(with_head(aligned, **changes))
        assert all(map(torch.equal, scores, reference[0]))


def test_two_runs_give_bitwise_the_same_gradients(large):
    """Nothing is added up by atomics; 40 MB cut the 8192 rows' vocabulary into 14 blocks."""
    case = with_head(large, chunk_bytes=40_000_000)
    first, second = run(case)[1], run(case)[1]
    for one, other in zip(first, second, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


# Blocks: one; vocabulary cut; both cut, vocabulary outermost; both cut, rows outermost.
@pytest.mark.parametrize(
    ("N", "V", "chunk_bytes"),
    [(2000, 3000, 1 << 28), (2000, 9000, 12 << 20), (9000, 9000, 12 << 20), (9000, 5000, 12 << 20)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_every_cut(N, V, chunk_bytes, dtype):
    """No bf16 running sum: the error is that of one rounding however the work is cut."""
    assert_right(
        make_case(N, V, 264, mask=True, dtype=dtype, chunk_bytes=chunk_bytes, device="cuda"),
        tolerance=3e-3,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a19_gradient_of_identical_rows(dtype):
    """16384 equal rows in 128 blocks (Liger-Kernel#512): a bf16 sum would stop at 256."""
    N, V, H = 16384, 64, 128
    case = make_case(N, V, H, dtype=dtype, entropy=False, device="cuda", chunk_bytes=64 * 128 * 2)
    case = with_head(
        case, hidden=torch.ones_like(case.head.hidden), weight=torch.zeros_like(case.head.weight)
    )._replace(ids=torch.full((N,), 5, device="cuda"), grad_logps=torch.ones(N, device="cuda"))
    for chunk_bytes in (case.head.chunk_bytes, 1 << 28):
        gradients = run(with_head(case, chunk_bytes=chunk_bytes), HIDDEN_AND_WEIGHT)[1]
        wanted = torch.full((V, H), -N / V, device="cuda")
        wanted[5] += N
        torch.testing.assert_close(gradients.weight.float(), wanted, rtol=4e-3, atol=0)


def test_a20_fp16_logits_past_its_range():
    """Logits of +-262144 (unsloth-zoo#598), which fp16 cannot hold."""
    case = make_case(64, 300, 1024, dtype=torch.float16, device="cuda", entropy=False)
    sign = torch.randint(2, (300, 1), device="cuda") * 2 - 1
    weight = (16 * sign).expand(300, 1024).half().contiguous()
    case = with_head(case, hidden=torch.full_like(case.head.hidden, 16), weight=weight)
    scores, gradients = run(case)
    torch.testing.assert_close(scores.logps.double(), expected(case).logps, rtol=1e-6, atol=1e-5)
    assert gradients.weight.isfinite().all()


def test_fp16_gradients_of_small_coefficients_do_not_underflow():
    """g of 1e-7 times p of 1e-3 is below fp16's smallest number."""
    case = make_case(500, 1000, 256, dtype=torch.float16, device="cuda", entropy=False)
    small = case._replace(grad_logps=case.grad_logps * 1e-7)
    scaled, wanted = run(small, Needs(True, True, False, in_logits_dtype=True))[1], expected(small)
    assert relative_error(scaled.hidden, wanted.hidden) < 6e-4
    assert relative_error(scaled.weight, wanted.weight) < 6e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a21_fp32_is_no_tf32(dtype):
    """TF32 shows as 1e-2 (triton#6192, #2042); also where bf16 hidden meets an fp32 head."""
    case = make_case(64, 1000, 4096, device="cuda")
    weight = torch.randn(1000, 4096, device="cuda")
    hidden = case.head.hidden.to(dtype)
    scores, _ = run(with_head(case, hidden=hidden, weight=weight))
    wanted = expected(with_head(case, hidden=hidden, weight=weight))
    assert (scores.logps - wanted.logps).abs().max() < 1e-4


def test_torch_may_allow_tf32():
    case = make_case(64, 1000, 1024, device="cuda")
    exact = run(case)[0].logps
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        allowed = run(case)[0].logps
    finally:
        torch.set_float32_matmul_precision(before)
    assert 1e-6 < (allowed - exact).abs().max() < 1e-2


def peak_beyond(function) -> int:
    """Peak bytes that a call allocates, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a38_memory():
    """A frozen head makes no [V, H] buffer (prime-rl#3011); temporaries keep to chunk_bytes."""
    N, V, H, chunk_bytes = 2048, 100_000, 1024, 64 << 20
    case = make_case(N, V, H, dtype=torch.bfloat16, device="cuda", entropy=False)
    case = with_head(case, chunk_bytes=chunk_bytes)
    scores, _ = run(case, HIDDEN_AND_WEIGHT)
    saved = Saved(case.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)

    def backward(needs: Needs) -> int:
        return peak_beyond(
            lambda: triton_backend.backward(case.head, saved, case.grad_logps, None, needs=needs)
        )

    # Pass 2 may hold a compacted copy of hidden and an fp32 sum beside its chunk; 1 MB of numbers.
    rest = chunk_bytes + 4 * N * H + 2 * N * H + (1 << 20)
    assert backward(Needs(True, False, False)) <= rest + 2 * N * H
    assert backward(Needs(False, True, False)) <= rest + 2 * V * H
    assert backward(HIDDEN_AND_WEIGHT) <= rest + 2 * V * H + 2 * N * H
    mask = torch.rand(N, device="cuda") < 0.5
    forward = peak_beyond(
        lambda: triton_backend.forward(case.head, case.ids, mask, want=Want(True))
    )
    assert forward <= 33 << 20


@pytest.mark.parametrize(("N", "V", "H"), [(4, 262_144, 8193), (262_200, 300, 8192)])
def test_a43_offsets_past_two_to_the_31(N, V, H):
    """V H and N H past 2^31 (cut-cross-entropy#37), H odd and even; the last rows matter."""
    case = make_case(N, V, H, dtype=torch.bfloat16, device="cuda", entropy=False)
    case = case._replace(ids=torch.arange(V - 1, V - 1 - N, -1, device="cuda") % V)
    scores, gradients = run(case, HIDDEN_AND_WEIGHT)
    last = torch.arange(N - 4, N, device="cuda")
    small = rows_of(case, last)
    z = small.head.hidden.double() @ case.head.weight[: V // 2].double().T
    z = torch.cat((z, small.head.hidden.double() @ case.head.weight[V // 2 :].double().T), 1)
    log_p = z.log_softmax(-1)
    logps = log_p.gather(1, small.ids[:, None])[:, 0]
    assert (scores.logps[last] - logps).abs().max() < 5e-5
    dz = -log_p.exp() * case.grad_logps[last, None]
    dz[torch.arange(4), small.ids] += case.grad_logps[last]
    d_hidden = dz @ case.head.weight.double()
    assert relative_error(gradients.hidden[last], d_hidden) < 4e-3
    if N == 4:
        tail = dz[:, -1000:].T @ small.head.hidden.double()
        assert relative_error(gradients.weight[-1000:], tail) < 4e-3


def test_a44_more_rows_than_a_grid_axis_y_holds():
    """65537 tokens (Liger-Kernel#1294); also more rows than columns, in one block."""
    assert_right(
        make_case(65_537, 32, 16, dtype=torch.bfloat16, mask=True, device="cuda"), tolerance=4e-3
    )


def test_a47_compiled_variants_do_not_grow_with_the_number_of_rows():
    """50 lengths (xformers#1037): a few kernels, specialised on strides and flags only."""
    from ratio_kl.kernels.dlogits import dlogits_kernel
    from ratio_kl.kernels.score import score_kernel

    def variants() -> int:
        device = torch.cuda.current_device()
        return sum(len(k.device_caches[device][0]) for k in (score_kernel, dlogits_kernel))

    before = variants()
    for N in range(1, 300, 6):
        run(make_case(N, 300, 64, dtype=torch.bfloat16, device="cuda"))
    assert variants() - before <= 4


def test_captured_in_a_graph_the_passes_give_the_same():
    """While a graph is captured nothing is read on the host: rows are zeroed, not left out."""
    for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float16, 6e-4)):
        case = make_case(300, 1000, 256, mask=True, dtype=dtype, device="cuda")
        case.head.hidden[~case.mask] = torch.nan
        run(case)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), torch.cuda.graph(graph):
            scores, gradients = run(case)
        graph.replay()
        eager_scores, eager = run(case)
        assert torch.equal(scores.logps, eager_scores.logps)
        for captured, wanted in zip(gradients[:2], eager[:2], strict=True):
            assert relative_error(captured, wanted) < tolerance
        assert not gradients.hidden[~case.mask].any()


def test_a_large_head_in_bf16_to_the_stated_errors():
    """logps within 5e-5 of float64, gradients within 4e-3: 17 row tiles, 97 column tiles."""
    case = make_case(2100, 25_000, 4096, dtype=torch.bfloat16, device="cuda")
    scores, gradients = run(case, ALL)
    wanted = expected(case)
    assert (scores.logps - wanted.logps).abs().max() < 5e-5
    assert (scores.entropies - wanted.entropies).abs().max() < 5e-5
    assert relative_error(gradients.hidden, wanted.hidden) < 4e-3
    assert relative_error(gradients.weight, wanted.weight) < 4e-3

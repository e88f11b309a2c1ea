"""Faults that users of such losses have met: memory and work that nobody asked for.

Sizes are small, but such that the logits are many times the budget: N = 512 tokens and
V = 1,600 make 3.3 MB of float32 logits against a budget of 128 kB.
"""

import pytest
import torch

from cases.meter import Meter, metered
from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.config import RatioKLConfig
from support import Problem, problem, run

N, H, V = 512, 16, 1600
CHUNK_BYTES = 128 * 1024
LOGITS_BYTES = N * V * 4


def given_of(B: int = 4, V: int = V, N: int = N, dtype=torch.float32, **options) -> Problem:
    made = problem(1, None, B=B, T=N // B, H=H, V=V, dtype=dtype, poison=False, **options)
    return made.with_inputs(attention_mask=torch.ones(B, N // B))


def cost(given: Problem, chunk_bytes: int = CHUNK_BYTES, **options) -> Meter:
    """Forward and backward; the float32 gradients belong to the peak."""
    config = RatioKLConfig(beta=0.1, entropy_coef=0.01, **options)
    loss_fn = FusedLinearRatioKLLoss(config, process_group="local", chunk_bytes=chunk_bytes)
    leaves = [leaf for leaf in given.leaves.values() if leaf.requires_grad]
    with metered() as meter:
        out = loss_fn(*given.inputs, **given.options)
        if out.loss.requires_grad:
            torch.autograd.grad(out.loss, leaves)
    return meter


def gradient_bytes(given: Problem) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in given.leaves.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a29_one_long_sequence_costs_what_many_short_ones_do(level: str) -> None:
    """Chunks over the batch save nothing for one long sequence (linkedin/Liger-Kernel#439)."""
    options = {"importance_sampling_level": level, "top_entropy_quantile": 0.5}
    one, many = (cost(given_of(B), **options).peak for B in (1, 32))
    allowed = 3 * CHUNK_BYTES + gradient_bytes(given_of())
    assert max(one, many) <= allowed
    assert allowed < LOGITS_BYTES / 5
    # Per-sequence values are the only ones that differ.
    assert abs(one - many) <= 16 * 1024


def test_a29_memory_is_flat_in_the_vocabulary() -> None:
    """linkedin/Liger-Kernel#439, #953: only the weight's own gradient grows with V."""
    small, large = (
        cost(given).peak - gradient_bytes(given) for given in (given_of(V=V), given_of(V=4 * V))
    )
    # Tiles fill the budget to within one column; the problem is otherwise the same.
    assert abs(large - small) <= CHUNK_BYTES / 4


def test_a29_the_budget_is_kept() -> None:
    """linkedin/Liger-Kernel#1294: less to spend makes the peak smaller, down to one tile."""
    peaks = [cost(given_of(), chunk_bytes).peak for chunk_bytes in (1, 2**17, 2**19, 2**21)]
    assert peaks == sorted(peaks)
    fixed = peaks[0]
    for peak, chunk_bytes in zip(peaks[1:], (2**17, 2**19, 2**21), strict=True):
        assert peak - fixed <= chunk_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a30_no_temporary_of_the_weights_size_a_chunk(dtype: torch.dtype) -> None:
    """V x H temporaries each chunk, slower than the plain loss (linkedin/Liger-Kernel#1323).

    256 tokens as there: fewer than columns.
    """
    given = given_of(N=256, dtype=dtype)
    meters = [cost(given, chunk_bytes) for chunk_bytes in (1, 2**18)]
    for meter in meters:
        assert meter.shapes.count((V, H)) == 1, "the gradient itself, and nothing beside"
    accumulator = V * H * 4
    tile = 4 * 64 * 64 * 4  # the smallest tile may be used with any budget
    slack = 8 * 256 * H * 4  # tensors of the tokens' size
    assert meters[0].peak <= gradient_bytes(given) + accumulator + tile + slack
    assert meters[0].multiplications == meters[1].multiplications == 4 * 256 * H * V


@pytest.mark.parametrize(("dtype", "sums"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_a30_more_tokens_than_columns(dtype: torch.dtype, sums: int) -> None:
    """linkedin/Liger-Kernel#1323 the other way round: the weight's sum is kept whole.

    In bfloat16 that is its float32 sum, and the gradient rounded from it once.
    """
    given = given_of(N=2048, V=512, dtype=dtype)
    for chunk_bytes in (1, 2**18):
        meter = cost(given, chunk_bytes)
        assert meter.shapes.count((512, H)) == sums
        assert meter.shapes.count((2048, H)) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a32_pass_1_alone_without_gradients(mode) -> None:
    """Gradients computed when nobody asked (Liger-Kernel#703, #237)."""
    given = given_of()
    with mode():
        meter = cost(given)
    assert meter.passes == ["forward"]
    assert (V, H) not in meter.shapes
    assert meter.multiplications == N * H * V
    # Without frozen leaves the same call does three products more.
    assert cost(given).multiplications == 4 * N * H * V


def test_a32_no_entropy_and_no_reference_unless_asked_for() -> None:
    """Entropy computed when it is off (verl-project/verl#2608); the same for the reference."""
    given = given_of(reference="hidden")
    hidden, weight, ids, mask, _ = given.inputs
    with metered() as plain, torch.no_grad():
        out = linear_logprob(hidden, weight, ids, mask, chunk_bytes=CHUNK_BYTES)
    with metered() as both, torch.no_grad():
        linear_logprob(hidden, weight, ids, mask, chunk_bytes=CHUNK_BYTES, return_entropy=True)
    assert out.entropies.numel() == 0
    assert len(plain.shapes) < len(both.shapes)
    for beta, passes in ((0.1, ["forward"] * 2), (0.0, ["forward"])):
        loss_fn = FusedLinearRatioKLLoss(beta=beta, process_group="local")
        with metered() as meter, torch.no_grad():
            loss_fn(*given.inputs, **given.options)
        assert meter.passes == passes


@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("hidden", "weight"), ("bias",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a38_frozen_leaves_cost_nothing(frozen, dtype: torch.dtype) -> None:
    """A frozen head still makes its whole gradient (prime-rl#3011, flash-linear-attention#1253)."""
    # More columns than tokens, and fewer: different sums are kept whole.
    for tokens, columns in ((256, V), (2048, 512)):
        free = given_of(N=tokens, V=columns, dtype=dtype, bias=True)
        expected = run(FusedLinearRatioKLLoss(RatioKLConfig(beta=0.1)), free)
        given = given_of(N=tokens, V=columns, dtype=dtype, bias=True)
        for name in frozen:
            given.leaves[name].requires_grad_(False)
        meter = cost(given)
        products = 2 + ("hidden" not in frozen) + ("weight" not in frozen)
        assert meter.multiplications == products * tokens * H * columns
        if "weight" in frozen:
            assert (columns, H) not in meter.shapes
        loss_fn = FusedLinearRatioKLLoss(RatioKLConfig(beta=0.1))
        loss_fn(*given.inputs, **given.options).loss.backward()
        for name, leaf in given.leaves.items():
            if name in frozen:
                assert leaf.grad is None
            else:
                assert torch.equal(leaf.grad, expected.grads[name])


def test_a38_nothing_left_to_train() -> None:
    """PrimeIntellect-ai/prime-rl#3011 with every leaf frozen: no graph, pass 1 alone."""
    given = given_of(bias=True)
    for leaf in given.leaves.values():
        leaf.requires_grad_(False)
    out = FusedLinearRatioKLLoss(beta=0.1)(*given.inputs, **given.options)
    assert not out.loss.requires_grad
    assert cost(given).passes == ["forward"]

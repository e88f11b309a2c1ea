"""Faults that users of such losses have met: tails of the vocabulary, ids, shapes at the limits."""

import math

import pytest
import torch

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.config import RatioKLConfig
from ratio_kl.reference import reference_logprob
from support import assert_close, assert_same, problem, run, run_reference

# Bytes for tiles of 64 columns, of a few hundred, and of the whole vocabulary.
CHUNKS = [1, 400_000, 2**28]


def peaked(V: int, elsewhere: float, at: int, there: float):
    """h = 1, H = 16: every logit is `elsewhere`, but the one at `at`."""
    weight = torch.full((V, 16), elsewhere / 16)
    weight[at] = there / 16
    return torch.ones(1, 16), weight


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize(
    ("elsewhere", "there", "expected"), [(-200, -80, 0.0), (-32, -32, -6.907755278982137)]
)
def test_a09_tail_columns_add_nothing(chunk_bytes, elsewhere, there, expected) -> None:
    """Log-probs up to +123: columns past V counted as logit 0 (verl#2656, #2899, #5349)."""
    hidden, weight = peaked(1000, elsewhere, 3, there)
    out = linear_logprob(hidden, weight, torch.tensor([3]), chunk_bytes=chunk_bytes)
    assert out.logps.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


SIZES = [1, 7, 63, 65, 127, 129, 1000, 32001, 50257, 129920, 151936, 152064]


@pytest.mark.parametrize("V", SIZES)
def test_a09_any_vocabulary_size(V: int) -> None:
    """verl#2899 (V = 129920), RL-Kernel#215 (cap 131072), unsloth#91 (cap 65536)."""
    hidden, weight = torch.ones(2, 16), torch.randn(V, 16) / 16 - 12.5
    weight[V // 2] = -5.0
    ids = torch.tensor([V // 2, V - 1])
    # 8 MB cuts the larger vocabularies into several tiles.
    ours = linear_logprob(hidden, weight, ids, return_entropy=True, chunk_bytes=8 * 2**20)
    assert (ours.logps <= 1e-6).all()
    logps, entropies = reference_logprob(hidden.double(), weight.double(), ids)
    # Logits near -200 carry 1e-5 of float32 rounding each.
    torch.testing.assert_close(ours.logps.double(), logps, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(ours.entropies.double(), entropies, rtol=1e-4, atol=1e-6)


def given_ids(filling: int):
    config = RatioKLConfig(beta=0.1, entropy_coef=0.01)
    made = problem(3, config, B=2, T=4, H=16, V=64, dtype=torch.float32, poison=False)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    ids = torch.where(mask == 1, made.inputs[2], filling)
    return config, made.with_inputs(attention_mask=mask, action_ids=ids)


@pytest.mark.parametrize("junk", [-100, -1, 64, 2**31 - 1, 64 + 10**6, -(2**63), 2**63 - 1])
def test_a10_ids_at_padding_do_not_matter(junk: int) -> None:
    """Device-side assert from garbage ids at padding (RL-Align/RL-Kernel#161)."""
    config, clean = given_ids(0)
    _, spoilt = given_ids(junk)
    loss_fn = FusedLinearRatioKLLoss(config, process_group="local")
    assert_same(run(loss_fn, spoilt), run(loss_fn, clean), 0.0)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("bad", [-1, -100, 64, 2**31])
def test_a10_an_active_id_out_of_range_is_refused(bad: int, chunk_bytes: int) -> None:
    """RL-Align/RL-Kernel#161: no crash and no silent number where the mask is 1."""
    config, given = given_ids(0)
    ids = given.inputs[2].clone()
    ids[1, 2] = bad
    loss_fn = FusedLinearRatioKLLoss(config, process_group="local", chunk_bytes=chunk_bytes)
    expected = r"action_ids must lie in \[0, 64\) on active tokens; got 1 active token"
    with pytest.raises(ValueError, match=expected):
        run(loss_fn, given.with_inputs(action_ids=ids))


def test_a10_an_id_of_a_padded_vocabulary_row_is_refused() -> None:
    """RL-Align/RL-Kernel#161 with vocab_size: the rows exist, but name no token."""
    hidden, weight = torch.randn(3, 4), torch.randn(64, 4)
    ids = torch.tensor([59, 60, 63])
    with pytest.raises(ValueError, match=r"\[0, 60\) on active tokens; got 2 active token"):
        linear_logprob(hidden, weight, ids, vocab_size=60)


def test_a11_ignored_labels_read_no_stale_memory() -> None:
    """Garbage log-probs for label -100 from an unwritten buffer (PrimeIntellect-ai/prime-rl#1525).

    Fresh memory holds NaN in these tests; the freed block is for allocators that reuse it.
    """
    hidden, weight = torch.randn(2, 4, 16), torch.randn(64, 16)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    ids = torch.where(mask == 1, 5, -100)
    results = []
    for _ in range(2):
        stale = torch.full((1_000_000,), math.nan)
        del stale
        results.append(linear_logprob(hidden, weight, ids, mask, return_entropy=True)[:2])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[mask == 0], torch.zeros(4))
        assert first[mask == 1].isfinite().all()


@pytest.mark.parametrize(("B", "T"), [(1, 65537), (65537, 1)])
def test_a44_more_than_65535_tokens(B: int, T: int) -> None:
    """Crash from 65536 tokens on (linkedin/Liger-Kernel#1294); H=16, V=32 as reported."""
    config = RatioKLConfig(beta=0.1, top_entropy_quantile=0.5)
    given = problem(5, config, B=B, T=T, H=16, V=32, dtype=torch.float32)
    actual = run(FusedLinearRatioKLLoss(config, process_group="local"), given)
    expected = run_reference(config, given.to(torch.float64))
    # 65537 float32 terms in a sum; the loss cancels, so it is measured against a term.
    assert abs(actual.loss.item() - expected.loss.item()) <= 1e-5
    assert actual.metrics["active_tokens"] == expected.metrics["active_tokens"]
    assert_close(actual.outputs["logps"], expected.outputs["logps"], 1e-5, "logps")


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_a48_padded_vocabulary_rows_change_nothing(junk: float) -> None:
    """Train and rollout log-probs differ: 152064 rows, 151936 real (RL-Align/RL-Kernel#329)."""
    V, rows = 151936, 152064
    hidden, padded = torch.randn(3, 4), torch.randn(rows, 4)
    padded[V:] = junk
    bias = torch.randn(rows)
    bias[V:] = junk
    ids = torch.tensor([0, 77, V - 1])

    def scored(weight, bias, **options):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
        out = linear_logprob(
            leaves[0], leaves[1], ids, bias=leaves[2], return_entropy=True, **options
        )
        grads = torch.autograd.grad(out.logps.sum() + out.entropies.sum(), leaves)
        return [*out[:2], *grads]

    ours = scored(padded, bias, vocab_size=V)
    exact = scored(padded[:V], bias[:V])
    for a, b in zip(ours, exact, strict=True):
        assert torch.equal(a[: b.shape[0]], b)
    for grad in ours[3:]:
        assert torch.equal(grad[V:], torch.zeros_like(grad[V:]))

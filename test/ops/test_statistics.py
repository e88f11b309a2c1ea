"""The three further numbers of a token: log sum p^2, the mean logit, whether it is the top one."""

import pytest
import torch
from torch import Tensor

from ratio_kl import linear_logprob

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which warns of the NaN and inf that kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ("torch", "triton")
# Sums of at most 300 float32 terms, of logits near 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def needs_triton(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["backend"] == "triton":
        pytest.importorskip("triton")


def draw(N: int, V: int, H: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    hidden = torch.randn(N, H).to(DEVICE, dtype)
    weight = torch.randn(V, H).to(DEVICE, dtype) * H**-0.5
    return hidden, weight, torch.randint(V, (N,)).to(DEVICE)


def exact(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = z.double()
    return (2 * z.log_softmax(-1)).logsumexp(-1), z.mean(-1), z.argmax(-1) == ids


# V: less than a tile, a tile of the interpreter, several with a tail. H: no multiple of a depth.
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("V", [1, 63, 64, 300])
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_full_logits(backend: str, V: int, with_entropy: bool) -> None:
    hidden, weight, ids = draw(70, V, 33)
    bias = torch.randn(V, device=DEVICE)
    modifiers = {"bias": bias, "temperature": 0.7, "softcap": 3.0, "logit_scale": 1.3}
    z = 3.0 * torch.tanh((hidden @ weight.T + bias) * 1.3 / 3.0) / 0.7
    ids[::2] = z.argmax(-1)[::2]
    out = linear_logprob(
        hidden, weight, ids, return_statistics=True, return_entropy=with_entropy,
        backend=backend, chunk_bytes=1, **modifiers,
    )  # fmt: skip
    log_sum_sq, mean, top1 = exact(z, ids)
    torch.testing.assert_close(out.log_sum_sq_probs.double(), log_sum_sq, **TOLERANCE)
    torch.testing.assert_close(out.mean_logits.double(), mean, **TOLERANCE)
    assert out.is_top1.dtype == torch.bool
    torch.testing.assert_close(out.is_top1, top1)
    assert top1.any()
    plain = linear_logprob(
        hidden, weight, ids, return_entropy=True, backend=backend, chunk_bytes=1, **modifiers
    )
    assert torch.equal(out.logps, plain.logps)
    if with_entropy:
        assert torch.equal(out.entropies, plain.entropies)
    assert [x.numel() for x in plain[2:]] == [0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_logits_the_first_is_the_top_one(backend: str) -> None:
    # 200 equal columns: the largest logit stands in every tile.
    hidden, weight = torch.ones(3, 4, device=DEVICE), torch.ones(200, 4, device=DEVICE)
    ids = torch.tensor([0, 1, 199], device=DEVICE)
    out = linear_logprob(hidden, weight, ids, return_statistics=True, backend=backend)
    assert out.is_top1.tolist() == [True, False, False]
    expected = torch.full((3,), -5.298317366548036, device=DEVICE)  # log(200 / 200^2)
    torch.testing.assert_close(out.log_sum_sq_probs, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.mean_logits, 0 * expected + 4, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inactive_tokens_say_nothing_and_padded_rows_do_not_count(backend: str) -> None:
    hidden, weight, ids = draw(9, 130, 16)
    hidden, ids = hidden.reshape(3, 3, 16), ids.clamp(max=99).reshape(3, 3)
    mask = torch.rand(3, 3, device=DEVICE) > 0.4
    mask[0] = torch.tensor([True, False, True])
    spoilt = torch.where(mask[..., None], hidden, torch.nan)
    weight[100:] = torch.inf
    out = linear_logprob(
        spoilt, weight, ids, mask, vocab_size=100, return_statistics=True, backend=backend
    )
    values = exact(hidden @ weight[:100].T, ids)
    for actual, value in zip(out[2:], values, strict=True):
        assert actual.shape == (3, 3)
        assert (actual[~mask] == 0).all()
        torch.testing.assert_close(actual[mask].double(), value[mask].double(), **TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_none_of_them_is_differentiable(backend: str) -> None:
    hidden, weight, ids = draw(5, 70, 16)
    out = linear_logprob(
        hidden.requires_grad_(), weight, ids, return_statistics=True, backend=backend
    )
    assert out.logps.requires_grad
    assert not any(x.requires_grad for x in out[2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_logits_and_ids_out_of_range_are_no_top_ones(backend: str) -> None:
    hidden, weight, ids = draw(4, 70, 16)
    hidden[1] = torch.nan
    ids[1] = 0
    out = linear_logprob(hidden, weight, ids, return_statistics=True, backend=backend)
    assert not out.is_top1[1]
    assert out.log_sum_sq_probs[1].isnan()
    assert out.mean_logits[1].isnan()
    assert out.log_sum_sq_probs[[0, 2, 3]].isfinite().all()

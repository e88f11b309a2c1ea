"""Every public function but the loss on random calls, against the long-hand reference in float64.

On the torch backend and, in the interpreter, on Triton; test_on_gpu.py has larger ones.
"""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from properties.agreement import assert_head_agrees
from properties.draws import (
    FLOATS,
    Head,
    head_call,
    heads,
    holds,
    in_float64,
    laid_out,
)
from ratio_kl import (
    high_entropy_mask,
    linear_logprob,
    linear_ratio_kl,
    ratio_kl,
)
from ratio_kl.reference import reference_logprob

# The interpreter computes in numpy, which warns of the NaN and inf that kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FLOAT64 = (torch.float64,)


def scored(head: Head, backend: str, device: str = "cpu") -> None:
    """linear_logprob and its gradients agree with the reference."""
    call = head_call(head, device)
    ours = linear_logprob(
        *call[:4],
        **call.options,
        return_entropy=True,
        backend=backend,
        chunk_bytes=head.chunk_bytes,
    )
    assert_head_agrees(call, ours, head.seed)


@holds(heads(dtypes=(*FLOATS, torch.float64)), few=25)
def test_linear_logprob(head: Head) -> None:
    scored(head, "torch")


@pytest.mark.interpreter
@holds(heads(), few=6)
def test_linear_logprob_on_triton(head: Head) -> None:
    scored(head, "triton")


def ratio_is_right(head: Head, backend: str | None, device: str = "cpu") -> None:
    """linear_ratio_kl, and ratio_kl on the logits of the same call, agree with the formulas."""
    call = head_call(head, device)
    wide = in_float64(call)
    tensors = (wide.hidden, wide.weight, wide.action_ids, wide.active)
    logps = reference_logprob(*tensors, **wide.options)[0]
    random = torch.Generator().manual_seed(head.seed + 5)
    shift = torch.randn((2, *logps.shape), generator=random, dtype=torch.float64).to(device) * 0.3
    dtype = torch.promote_types(torch.float32, call.hidden.dtype)
    old, ref = ((logps.detach() + by).to(dtype) for by in shift)
    ratio, kl = linear_ratio_kl(
        *call[:4], old, ref_logps=ref, backend=backend, chunk_bytes=head.chunk_bytes, **call.options
    )
    wanted_ratio = torch.where(wide.active, logps - old, 0).exp()
    delta = torch.where(wide.active, ref - logps, 0)
    size = (1 + logps.abs().max().item()) * (1 + wanted_ratio.max().item())
    bound = (2e-4 if dtype == torch.float32 else 1e-12) * size
    assert (ratio - wanted_ratio).abs().max() <= bound
    assert (kl - (delta.exp() - delta - 1)).abs().max() <= bound
    assert (ratio[~call.active] == 1).all()
    assert not kl[~call.active].any()


CALM = heads(dtypes=(torch.float32, torch.float64)).filter(lambda h: h.values != "offset")


@holds(CALM, few=15)
def test_linear_ratio_kl(head: Head) -> None:
    ratio_is_right(head, "torch")


@pytest.mark.interpreter
@holds(CALM.filter(lambda h: torch.float64 not in (h.hidden_dtype, h.weight_dtype)), few=6)
def test_linear_ratio_kl_on_triton(head: Head) -> None:
    ratio_is_right(head, "triton")


def logits_are_right(head: Head, backend: str, device: str = "cpu") -> None:
    """ratio_kl and its gradient agree with full log-softmax in float64."""
    random = torch.Generator().manual_seed(head.seed + 6)
    shape = (head.B, head.T, head.V)
    policy, ref = torch.randn((2, *shape), generator=random, dtype=torch.float64) * 3
    shift = 300 if head.values == "offset" else 0
    policy, ref = policy + shift, ref - shift
    if head.values == "impossible":
        policy = torch.where(policy > 4, -torch.inf, policy)
    call = head_call(head, device)
    active = call.active
    ids = torch.where(active, call.action_ids, 0).clamp(0, head.V - 1).long()
    policy = policy.to(device).scatter(-1, ids[..., None], 0.5 + shift)

    def given(value: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
        rows = torch.where(active[..., None], value.to(device), torch.nan)
        return laid_out(rows.to(dtype), "plain" if layout == "expanded" else layout)

    x = given(policy, head.hidden_layout, head.hidden_dtype).requires_grad_()
    y = given(ref, head.weight_layout, head.weight_dtype)
    exact = x.detach().double().requires_grad_()
    log_p, log_q = (z[active].double().log_softmax(-1) for z in (exact, y))
    picked = ids[active][:, None]
    logp, ref_logp = (z.gather(1, picked)[:, 0] for z in (log_p, log_q))
    dtype = torch.promote_types(torch.float32, head.hidden_dtype)
    old = torch.full((head.B, head.T), torch.nan, device=device, dtype=dtype)
    old[active] = (logp.detach() + 0.2).to(dtype)
    wanted = torch.stack(
        [(logp - old[active]).exp(), torch.expm1(ref_logp - logp) - ref_logp + logp]
    )
    ratio, kl = ratio_kl(x, y, call.action_ids, call.attention_mask, old, backend=backend)
    assert (ratio[~active] == 1).all()
    assert not kl[~active].any()
    if not active.any():
        return
    ours = torch.stack([ratio[active], kl[active]])
    # Beside rounding, exp grows the error of its argument; kl is at most e^|d|.
    unit = 2.0**-18 if dtype == torch.float32 else 2.0**-46
    scale = 1 + wanted.abs().detach().amax(1, keepdim=True)
    offset = 100 if head.values == "offset" and head.hidden_dtype != torch.float64 else 1
    assert ((ours - wanted).abs() / scale <= offset * unit).all()
    (grad,) = torch.autograd.grad(ours.sum(), x)
    (exact_grad,) = torch.autograd.grad(wanted.sum(), exact)
    assert not grad[~active].any()
    narrow = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(head.hidden_dtype, 0.0)
    bound = (offset * 4 * unit + narrow) * scale.max()
    assert ((grad - exact_grad).abs().max() <= bound + 2.0**-24).all()


@holds(heads(dtypes=(*FLOATS, torch.float64)), few=20)
def test_ratio_kl(head: Head) -> None:
    logits_are_right(head, "torch")


@pytest.mark.interpreter
@holds(heads(), few=6)
def test_ratio_kl_on_triton(head: Head) -> None:
    logits_are_right(head, "triton")


LEVELS = st.lists(
    st.sampled_from((0.0, 0.5, 0.5, 1.25, 2.0, 3.3, torch.inf)), min_size=1, max_size=40
)


@holds(st.tuples(LEVELS, st.integers(0, 2**20), st.floats(0, 1, width=32), st.booleans()), few=60)
def test_high_entropy_mask(drawn: tuple[list[float], int, float, bool]) -> None:
    """Equal to torch.quantile over the active entropies, ties and infinities included."""
    levels, bits, share, double = drawn
    entropies = torch.tensor(levels, dtype=torch.float64 if double else torch.float32)
    mask = torch.tensor([bits >> i & 1 for i in range(len(levels))]).bool()
    spoilt = torch.where(mask, entropies, torch.nan)
    kept = high_entropy_mask(spoilt, mask, share, "local")
    if not mask.any():
        assert not kept.any()
        return
    threshold = torch.quantile(entropies[mask], 1 - share)
    wanted = mask if share == 1 else mask & (entropies >= threshold)
    assert torch.equal(kept, wanted)

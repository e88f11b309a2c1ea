"""ratio_kl on logits that the caller holds: one launch forward, one backward.

For an active token with logits x (policy) and y (reference), action a:

    logp  = (x[a] - max x) - log sum exp(x - max x)        ref_logp likewise from y
    ratio = exp(logp - old_logp),   d = ref_logp - logp,   kl = exp(d) - d - 1
    c     = grad_ratio ratio + grad_kl (1 - exp(d)),       grad_x[v] = c (onehot(a) - softmax(x))

The one place below the objectives that holds a loss formula. Never stored: probabilities,
masked copies of logits. Saved: max, log_sum and d (delta), one number a token each.
Logits of an inactive token are never read; its ratio is 1, its kl 0, its gradient 0.
"""

import triton
import triton.language as tl

from .primitives import LOG2E, below


@triton.jit
def row_offset(token, T, stride_b, stride_t):
    """Offset of token b * T + t in a tensor of [B, T] rows."""
    return token // T * stride_b + token % T * stride_t


@triton.jit
def running_sum(x, top, total):
    """Each lane's (max so far, sum of exp(x - max so far)) after one more tile x [LANES, WIDTH].

    Lanes meet only at the end of the row, so that no barrier interrupts the loads.
    """
    higher = tl.maximum(top, tl.max(x, 1))
    total *= tl.exp2(below(top, higher) * LOG2E)
    return higher, total + tl.sum(tl.exp2(below(x, higher[:, None]) * LOG2E), 1)


@triton.jit
def whole_sum(top, total):
    """(max, log of the sum of exp(x - max)) of the row, from its lanes'."""
    highest = tl.max(top, 0)
    return highest, tl.log(tl.sum(total * tl.exp2(below(top, highest) * LOG2E), 0))


@triton.jit
def ratio_kl_kernel(
    policy_ptr,
    ref_ptr,
    ids_ptr,
    mask_ptr,
    old_logps_ptr,
    ratio_ptr,
    kl_ptr,
    max_ptr,
    log_sum_ptr,
    delta_ptr,
    bad_ptr,
    T,
    V,
    stride_pb,
    stride_pt,
    stride_pv,
    stride_rb,
    stride_rt,
    stride_rv,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if tl.load(mask_ptr + token) == 0:
        tl.store(ratio_ptr + token, 1.0)
        tl.store(kl_ptr + token, 0.0)
        tl.store(delta_ptr + token, 0.0)
        tl.store(max_ptr + token, 0.0)
        tl.store(log_sum_ptr + token, 0.0)
        tl.store(bad_ptr + token, 0)
        return
    policy = policy_ptr + row_offset(token, T, stride_pb, stride_pt)
    ref = ref_ptr + row_offset(token, T, stride_rb, stride_rt)
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    ref_top, ref_total = top, total
    for start in range(0, V, LANES * WIDTH):
        v = start + lane  # [LANES, WIDTH]
        at = v.to(tl.int64)
        x = tl.load(policy + at * stride_pv, mask=v < V, other=-float("inf")).to(tl.float32)
        y = tl.load(ref + at * stride_rv, mask=v < V, other=-float("inf")).to(tl.float32)
        top, total = running_sum(x, top, total)
        ref_top, ref_total = running_sum(y, ref_top, ref_total)
    top, log_sum = whole_sum(top, total)
    ref_top, ref_log_sum = whole_sum(ref_top, ref_total)

    action = tl.load(ids_ptr + token).to(tl.int64)
    bad = (action < 0) | (action >= V)
    action = tl.where(bad, 0, action)
    logp = (tl.load(policy + action * stride_pv).to(tl.float32) - top) - log_sum
    ref_logp = (tl.load(ref + action * stride_rv).to(tl.float32) - ref_top) - ref_log_sum
    logp = tl.where(bad, float("nan"), tl.where(logp > 0, 0.0, logp))
    ref_logp = tl.where(ref_logp > 0, 0.0, ref_logp)
    d = ref_logp - logp
    tl.store(ratio_ptr + token, tl.exp(logp - tl.load(old_logps_ptr + token).to(tl.float32)))
    tl.store(kl_ptr + token, tl.exp(d) - d - 1.0)
    tl.store(delta_ptr + token, d)
    tl.store(max_ptr + token, top)
    tl.store(log_sum_ptr + token, log_sum)
    tl.store(bad_ptr + token, bad.to(tl.int8))


@triton.jit
def ratio_kl_backward_kernel(
    policy_ptr,
    ids_ptr,
    mask_ptr,
    ratio_ptr,
    delta_ptr,
    max_ptr,
    log_sum_ptr,
    grad_ratio_ptr,
    grad_kl_ptr,
    grad_policy_ptr,
    T,
    V,
    stride_pb,
    stride_pt,
    stride_pv,
    BLOCK_V: tl.constexpr,
):
    blocks = tl.cdiv(V, BLOCK_V)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    v = (tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    c = 0.0
    if grad_ratio_ptr is not None:
        c += tl.load(grad_ratio_ptr + token) * tl.load(ratio_ptr + token)
    if grad_kl_ptr is not None:
        c += tl.load(grad_kl_ptr + token) * (1.0 - tl.exp(tl.load(delta_ptr + token)))
    c = tl.where(tl.load(mask_ptr + token) == 0, 0.0, c)
    limit = tl.where(c == 0, 0, V)
    policy = policy_ptr + row_offset(token, T, stride_pb, stride_pt)
    x = tl.load(policy + v * stride_pv, mask=v < limit, other=-float("inf")).to(tl.float32)
    p = tl.exp2(
        ((x - tl.load(max_ptr + token)) - tl.load(log_sum_ptr + token)) * LOG2E
    )  # [BLOCK_V]
    action = tl.load(ids_ptr + token).to(tl.int64)
    grad = tl.where(c == 0, 0.0, c * (tl.where(v == action, 1.0, 0.0) - p))
    out = grad_policy_ptr + token * V + v
    tl.store(out, grad.to(grad_policy_ptr.dtype.element_ty), mask=v < V)

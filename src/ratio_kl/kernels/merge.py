"""Pass 1, row part: a row's partials -> logp, entropy, max, log_sum.

With the partials of kernels/score.py read in a fixed order, and the action's logit z computed
here, by a dot product in fp32:

    max     = max top
    mass    = sum exp(top - max) mass_i
    moment  = sum exp(top - max) (moment_i + (top - max) mass_i)
    log_sum = log mass,   entropy = log_sum - moment / mass,   logp = min(0, (z - max) - log_sum)

and if the statistics are asked for, in the same order

    log sum p^2 = log(sum exp(top - max)^2 square_i) - 2 log mass,   mean z = sum plain_i / V
    top1        = the action is the first column of the largest top

Stored: one number of each a row. An id outside [0, V) gives logp NaN; without a mask the first
program counts them (with one, the listing of the active rows does).
"""

import triton
import triton.language as tl

from .primitives import LOG2E, below, count_bad_ids, modified_logits

WARPS = 4
"""Blocks are one element a thread: a sum's order then follows from its length alone, and not from
how many elements the alignment of a row allows a thread to load at once."""


@triton.jit
def action_product(
    hidden_ptr,
    weight_ptr,
    row,
    action,
    H,
    stride_hn,
    stride_hh,
    stride_wv,
    stride_wh,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """hidden[row] . weight[action] in fp32, [1, 1]."""
    total = tl.zeros((BLOCK,), tl.float32)
    for h in tl.range(0, H, 8 * BLOCK):
        for step in tl.static_range(8):
            k = (h + step * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
            a = tl.load(hidden_ptr + row * stride_hn + k * stride_hh, mask=k < H, other=0.0)
            b = tl.load(weight_ptr + action * stride_wv + k * stride_wh, mask=k < H, other=0.0)
            total += a.to(DTYPE).to(tl.float32) * b.to(DTYPE).to(tl.float32)
    return tl.reshape(tl.sum(total, 0, keep_dims=True), (1, 1))


@triton.jit
def merge_partials(partial, S, stride_pq, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """A row's max, mass and moment (0 without the entropy)."""
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    for s in tl.range(0, S, BLOCK):
        i = s + tl.arange(0, BLOCK)
        top = tl.load(partial + i, mask=i < S, other=-float("inf"))
        tops = tl.maximum(tops, top, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(tops, 0)
    masses = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    for s in tl.range(0, S, BLOCK):
        i = s + tl.arange(0, BLOCK)
        gap = below(tl.load(partial + i, mask=i < S, other=-float("inf")), largest)
        share = tl.exp2(gap * LOG2E)
        mass = tl.load(partial + stride_pq + i, mask=i < S, other=0.0)
        masses += share * mass
        if WITH_ENTROPY:
            moment = tl.load(partial + 2 * stride_pq + i, mask=i < S, other=0.0)
            moments += share * (moment + gap * mass)
    return largest, tl.sum(masses, 0), tl.sum(moments, 0)


@triton.jit
def merge_statistics(
    partial, extra, largest, mass, action, V, S, out_ptr, stride_pq, stride_q,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's three statistics, from its tops at `partial` and its further partials at `extra`."""
    squares = tl.zeros((BLOCK,), tl.float32)
    plains = tl.zeros((BLOCK,), tl.float32)
    bests = tl.full((BLOCK,), float("inf"), tl.float32)
    for s in tl.range(0, S, BLOCK):
        i = s + tl.arange(0, BLOCK)
        top = tl.load(partial + i, mask=i < S, other=-float("inf"))
        share = tl.exp2(below(top, largest) * LOG2E)
        squares += share * share * tl.load(extra + i, mask=i < S, other=0.0)
        plains += tl.load(extra + stride_pq + i, mask=i < S, other=0.0)
        best = tl.load(extra + 2 * stride_pq + i, mask=i < S, other=float("inf"))
        bests = tl.minimum(bests, tl.where(top == largest, best, float("inf")))
    tl.store(out_ptr, tl.log(tl.sum(squares, 0)) - 2 * tl.log(mass))
    tl.store(out_ptr + stride_q, tl.sum(plains, 0) / V)
    tl.store(out_ptr + 2 * stride_q, (tl.min(bests, 0) == action.to(tl.float32)).to(tl.float32))


@triton.jit
def store_bad_ids(ids_ptr, out_ptr, N, V, stride, BLOCK: tl.constexpr):
    """out = how many of all N ids lie outside [0, V)."""
    bad_ids = tl.zeros((), tl.int64)
    for start in range(0, N, BLOCK):
        n = (start + tl.arange(0, BLOCK)).to(tl.int64)
        bad_ids += count_bad_ids(ids_ptr + n * stride, n < N, V)
    tl.store(out_ptr, bad_ids)


@triton.jit(do_not_specialize=["start", "N"])
def merge_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    logit_scale_ptr,
    softcap_ptr,
    temperature_ptr,
    rows_ptr,
    count_ptr,
    ids_ptr,
    partials_ptr,
    logps_ptr,
    entropies_ptr,
    max_ptr,
    log_sum_ptr,
    bad_ids_ptr,
    statistics_ptr,
    start,
    N,
    V,
    H,
    S,
    stride_hn,
    stride_hh,
    stride_wv,
    stride_wh,
    stride_tn,
    stride_in,
    stride_pn,
    stride_pq,
    stride_sq,
    WITH_ENTROPY: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row + start
    if rows_ptr is None:
        if token == 0:
            store_bad_ids(ids_ptr, bad_ids_ptr, N, V, stride_in, 8 * BLOCK)
    if count_ptr is not None:
        count = tl.load(count_ptr)
        if token >= count:
            return
    if rows_ptr is not None:
        token = tl.load(rows_ptr + token).to(tl.int64)
    partial = partials_ptr + row * stride_pn
    largest, mass, moment = merge_partials(partial, S, stride_pq, WITH_ENTROPY, BLOCK)
    log_sum = tl.log(mass)

    action = tl.load(ids_ptr + token * stride_in).to(tl.int64)
    bad = (action < 0) | (action >= V)
    action = tl.where(bad, 0, action)
    x = action_product(
        hidden_ptr, weight_ptr, row, action, H, stride_hn, stride_hh, stride_wv, stride_wh,
        DTYPE, BLOCK,
    )  # fmt: skip
    one = tl.zeros((1,), tl.int64)
    z = modified_logits(
        x, one + action, V, one + token, stride_tn,
        bias_ptr, logit_scale_ptr, softcap_ptr, temperature_ptr,
    )  # fmt: skip
    logp = (tl.sum(tl.sum(z, 1), 0) - largest) - log_sum
    logp = tl.where(logp > 0, 0.0, logp)
    logp = tl.where(bad, float("nan"), logp)
    tl.store(logps_ptr + token, logp)
    tl.store(max_ptr + token, largest)
    tl.store(log_sum_ptr + token, log_sum)
    if WITH_ENTROPY:
        entropy = log_sum - moment / mass
        tl.store(entropies_ptr + token, tl.where(entropy < 0, 0.0, entropy))
    if statistics_ptr is not None:
        extra = partial + (3 if WITH_ENTROPY else 2) * stride_pq
        merge_statistics(
            partial, extra, largest, mass, tl.where(bad, -1, action), V, S,
            statistics_ptr + token, stride_pq, stride_sq, BLOCK,
        )  # fmt: skip

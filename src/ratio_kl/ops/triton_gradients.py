"""Pass 2 of the Triton backend: which rows, which blocks, and the two matrix products.

    for each block of rows n and columns v:   dx = kernels/dlogits.py
        d_hidden[n] += dx @ weight[v],   d_weight[v] += dx.T @ hidden[n],   d_bias[v] += sum_n dx

Every sum over blocks is kept in fp32 and rounded once. Of the two gradients the larger one is
cut by the outer loop, so that only the smaller one needs an fp32 copy of its whole size.
"""

import torch
from torch import Tensor

from ..kernels.tiles import programs, tile_for
from .blocks import Plan, Side, plan
from .contract import Gradients, Head, HiddenDone, Needs, Saved
from .triton_launch import Rows, dlogits, gather_rows, list_kept, scatter_rows

FP16_TARGET = 2.0**13
"""fp16 dx is scaled to stay below this: far from overflow (65504) and from underflow (6e-8)."""


class _Sum:
    """One gradient [lines, H], summed over products in fp32 and rounded once into `out`."""

    def __init__(self, out: Tensor, lines: int, spans: bool, in_place: bool) -> None:
        """lines: of the fp32 sum. spans: it holds all of out's lines, not one block's."""
        self.out, self.spans = out, spans
        self.buffer = None
        if not (in_place or out.dtype == torch.float32):
            self.buffer = out.new_empty((lines, out.shape[1]), dtype=torch.float32)

    def add(self, lines: slice, a: Tensor, b: Tensor, ends: tuple[bool, bool], by: Rows) -> None:
        """out[lines] += a @ b; ends: whether it is these lines' first product, and their last."""
        first, last = ends
        target = self.out[lines]
        if self.buffer is not None:
            target = self.buffer[lines] if self.spans else self.buffer[: lines.stop - lines.start]
        _multiply(target, a, b, by.alpha, accumulate=not first)
        if last and by.unscale is not None:
            target.mul_(by.unscale)
        if last and self.buffer is not None:
            self.out[lines].copy_(target)


def _multiply(out: Tensor, a: Tensor, b: Tensor, alpha: float, accumulate: bool) -> None:
    """out = alpha a @ b, plus out if accumulate; summed in fp32."""
    beta = int(accumulate)
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif a.is_cuda and not torch.version.hip:
        torch.addmm(out, a, b, torch.float32, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, alpha=alpha, out=out)


def gradients(
    head: Head,
    saved: Saved,
    grads: tuple[Tensor | None, Tensor | None],
    needs: Needs,
    hidden_done: HiddenDone | None = None,
) -> Gradients:
    """Pass 2, as ratio_kl.ops.triton_backend.backward says; grads are contiguous."""
    needs = needs._replace(bias=needs.bias and head.bias is not None)
    if grads == (None, None) or head.hidden.shape[0] == 0:
        return _zero_gradients(head, needs)
    capturing = head.hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    work = _all_rows(head, saved, grads) if capturing else _kept(head, saved, grads)
    if work is None or not any(needs[:3]):
        return _zero_gradients(head, needs)
    # A gradient of hidden that is fp32 anyway is the sum that may span all blocks.
    blocks = _block(head, work.hidden.shape[0], needs, columns_outermost=hidden_done is not None)
    return _sum_blocks(head, work, needs, blocks, hidden_done)


def _gradient_dtype(leaf: Tensor, needs: Needs) -> torch.dtype:
    return torch.float32 if needs.in_logits_dtype else leaf.dtype


def _zero_gradients(head: Head, needs: Needs) -> Gradients:
    leaves = (head.hidden, head.weight, head.bias)
    return Gradients(
        *(
            leaf.new_zeros(leaf.shape, dtype=_gradient_dtype(leaf, needs))
            if wanted and leaf is not None
            else None
            for leaf, wanted in zip(leaves, needs[:3], strict=True)
        )
    )


def _gain(head: Head, saved: Saved, grads: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """The power of two by which fp16 dx is scaled: 0-d float64, from a bound on |dx|."""
    g, h = grads
    bound = torch.zeros_like(saved.logps) if g is None else g.abs()
    if h is not None:
        bound = bound + h.abs() * (1 + saved.entropies)
    for factor in (head.inverse_temperature, head.logit_scale):
        if factor is not None:
            bound = bound * factor.abs()
    largest = torch.where(bound.isfinite(), bound, 0).amax().double().clamp(1e-30)
    return torch.exp2(torch.floor(torch.log2(FP16_TARGET / largest)))


def _scaled(grads: tuple[Tensor | None, Tensor | None], gain: Tensor | None):
    if gain is None:
        return grads
    return tuple(None if g is None else (g * gain).float() for g in grads)


def _kept(head: Head, saved: Saved, grads: tuple[Tensor | None, Tensor | None]) -> Rows | None:
    """The rows with a gradient, for one host read; None if there are none."""
    rows, positions, count = list_kept(grads)
    alpha = 1.0
    if head.compute_dtype == torch.float16:
        gain = _gain(head, saved, grads)
        grads = _scaled(grads, gain)
        n, host_gain = torch.cat((count.double(), gain[None])).tolist()
        alpha = 1 / host_gain
    else:
        n = count.item()
    if n == 0:
        return None
    if n == rows.shape[0]:
        hidden = head.hidden.to(head.compute_dtype)
        return Rows(hidden, saved, grads, None, None, alpha, None)
    hidden = head.hidden.new_empty((int(n), head.hidden.shape[1]), dtype=head.compute_dtype)
    gather_rows(head.hidden, rows, count, hidden)
    return Rows(hidden, saved, grads, rows, positions, alpha, None)


def _all_rows(head: Head, saved: Saved, grads: tuple[Tensor | None, Tensor | None]) -> Rows:
    """All rows, those without a gradient replaced by rows whose p is 0: no host read."""
    keep = torch.stack([g != 0 for g in grads if g is not None]).any(0)
    hidden = torch.where(keep[:, None], head.hidden, 0).to(head.compute_dtype)
    saved = saved._replace(
        max=torch.where(keep, saved.max, float("inf")),
        log_sum=torch.where(keep, saved.log_sum, 0),
        entropies=torch.where(keep, saved.entropies, 0) if saved.entropies.numel() else saved.max,
    )
    gain = _gain(head, saved, grads) if head.compute_dtype == torch.float16 else None
    unscale = None if gain is None else (1 / gain).float()
    return Rows(hidden, saved, _scaled(grads, gain), None, None, 1.0, unscale)


def _block(head: Head, n: int, needs: Needs, *, columns_outermost: bool) -> Plan:
    """The blocks whose temporaries fit chunk_bytes: the larger side is cut by the outer loop."""
    tile = tile_for(head.hidden.device, head.compute_dtype)
    H, size = head.hidden.shape[1], head.compute_dtype.itemsize
    converted = H * size if head.weight.dtype != head.compute_dtype else 0
    rows = Side(n, tile.rows, line_bytes=0, sum_bytes=4 * H * needs.hidden)
    columns = Side(head.vocab_size, tile.columns, converted, sum_bytes=4 * H * needs.weight)
    at_once = programs(head.hidden.device)
    return plan(rows, columns, size, head.chunk_bytes, at_once, columns_outermost=columns_outermost)


def _sum_blocks(
    head: Head, work: Rows, needs: Needs, blocks: Plan, hidden_done: HiddenDone | None
) -> Gradients:
    """Walk the blocks and add up what each gives."""
    dtype, (V, H) = head.compute_dtype, head.weight.shape
    n, vocab_size = work.hidden.shape[0], head.vocab_size
    compact = n < head.hidden.shape[0]
    one_column_part, one_row_part = blocks.columns >= vocab_size, blocks.rows >= n
    d_hidden = d_weight = d_bias = whole_d_hidden = None
    if needs.hidden:
        result_dtype = torch.float32 if hidden_done else _gradient_dtype(head.hidden, needs)
        # What is spread over all rows later may stay fp32 until then.
        kind = torch.float32 if compact and not one_column_part else result_dtype
        d_hidden = _Sum(
            head.hidden.new_empty((n, H), dtype=kind),
            lines=blocks.rows if blocks.rows_outermost else n,
            spans=not blocks.rows_outermost,
            in_place=one_column_part and work.unscale is None and kind == dtype,
        )
    if needs.weight:
        kind = _gradient_dtype(head.weight, needs)
        d_weight = _Sum(
            head.weight.new_empty((V, H), dtype=kind),
            lines=vocab_size if blocks.rows_outermost else blocks.columns,
            spans=blocks.rows_outermost,
            in_place=one_row_part and work.unscale is None and kind == dtype,
        )
        d_weight.out[vocab_size:].zero_()
    if needs.bias:
        d_bias = head.weight.new_zeros(V, dtype=torch.float32)
    width = -(-blocks.columns // 64) * 64
    space = work.hidden.new_empty((blocks.rows, width))
    for rows, columns in blocks.walk(n, vocab_size):
        weight = head.weight[columns].to(dtype)
        dx = space[: rows.stop - rows.start, : columns.stop - columns.start]
        dlogits(head, work, weight, dx, (rows.start, columns.start))
        if d_hidden is not None:
            ends = columns.start == 0, columns.stop == vocab_size
            d_hidden.add(rows, dx, weight, ends, work)
            if rows.stop == n and columns.stop == vocab_size:
                whole_d_hidden = _spread(d_hidden.out, work, result_dtype)
                if hidden_done is not None:
                    hidden_done(whole_d_hidden)
        if d_weight is not None:
            ends = rows.start == 0, rows.stop == n
            d_weight.add(columns, dx.T, work.hidden[rows], ends, work)
        if d_bias is not None:
            d_bias[columns] += dx.sum(0, dtype=torch.float32)
    if d_bias is not None and head.bias is not None:
        d_bias *= work.alpha if work.unscale is None else work.unscale
        d_bias = d_bias.to(_gradient_dtype(head.bias, needs))
    return Gradients(
        whole_d_hidden,
        None if d_weight is None else d_weight.out,
        d_bias,
    )


def _spread(compact: Tensor, work: Rows, dtype: torch.dtype) -> Tensor:
    """d_hidden of the rows of pass 2 -> of all rows, in the gradient's dtype."""
    if work.positions is None:
        return compact
    out = compact.new_empty((work.positions.shape[0], compact.shape[1]), dtype=dtype)
    scatter_rows(compact, work.positions, out)
    return out

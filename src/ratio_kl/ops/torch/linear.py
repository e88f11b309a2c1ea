"""The two passes in chunked eager PyTorch: any device, float64 too.

With logits z in float32 (float64 for float64 inputs), one tile of rows x vocabulary at a time:

    pass 1   online max, sum exp(z - max), sum exp(z - max) (z - max)   -> logps, entropies
    pass 2   dz = g (onehot - p) - h p (log p + H)                      -> d_hidden, d_weight

Never stored: the logits of more than one tile. Kept between the passes: max and log_sum of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Gradients, Head, HiddenDone, Needs, Saved, Scores, Want
from .products import RunningGradient
from .tiling import LogitTiles, select, tile_view

# Stands in for -inf where it meets a zero (0 * -inf is NaN); exp of it is exactly 0.
_VERY_NEGATIVE = -1e4


def forward(
    head: Head,
    action_ids: Tensor,
    mask: Tensor | None,
    *,
    want: Want,
    bad_ids: Tensor | None = None,
) -> Scores:
    """Pass 1 (contract.py). Inactive rows are selected away before anything is computed."""
    rows = None if mask is None or bool(mask.all()) else mask.nonzero().squeeze(1)
    ids = select(action_ids, rows).to(torch.int64)
    count_of_bad = ((ids < 0) | (ids >= head.vocab_size)).sum()
    tiles = LogitTiles(head, rows, buffers=2 + want.statistics)
    sums = _OnlineSums(ids, tiles.dtype, want)
    for columns in tiles.column_blocks():
        weight = tiles.weight(columns)
        for block in tiles.row_blocks():
            sums.absorb(block, columns, tiles.logits(block, columns, weight), tiles.scratch)
    log_sum = sums.total.log()
    logps = torch.clamp((sums.target - sums.peak) - log_sum, max=0)
    entropies = torch.clamp(log_sum - sums.dot / sums.total, min=0) if want.entropy else sums.dot
    count = action_ids.shape[0]
    return Scores(
        logps=_scatter(logps, rows, count),
        entropies=_scatter(entropies, rows, count) if want.entropy else entropies,
        max=_scatter(sums.peak, rows, count),
        log_sum=_scatter(log_sum, rows, count),
        bad_ids=count_of_bad if bad_ids is None else bad_ids.copy_(count_of_bad, non_blocking=True),
        statistics=_scatter(sums.statistics(head.vocab_size).T, rows, count).T.contiguous()
        if want.statistics
        else sums.peak.new_empty((3, 0)),
    )


def backward(
    head: Head,
    saved: Saved,
    grad_logps: Tensor | None,
    grad_entropies: Tensor | None,
    *,
    needs: Needs,
    hidden_done: HiddenDone | None = None,
) -> Gradients:
    """Pass 2 (contract.py). Rows whose coefficients are both exactly zero are left out."""
    rows = _rows_with_coefficient(grad_logps, grad_entropies)
    state = _RowState.select(saved, grad_logps, grad_entropies, rows)
    buffers = 3 + (head.softcap is not None)
    tiles = LogitTiles(head, rows, buffers=buffers, sums=True)
    # The gradient that every tile adds to is kept whole in the sums' dtype: the smaller one.
    hidden_whole = tiles.count <= head.vocab_size or hidden_done is not None
    d_hidden = d_weight = d_bias = None
    if needs.hidden:
        dtype = tiles.dtype if hidden_done else _gradient_dtype(head.hidden, tiles, needs)
        d_hidden = RunningGradient(head.hidden, dtype, tiles, hidden_whole, rows)
    if needs.weight:
        dtype = _gradient_dtype(head.weight, tiles, needs)
        d_weight = RunningGradient(head.weight, dtype, tiles, not hidden_whole)
    if needs.bias:
        d_bias = head.weight.new_zeros(head.weight.shape[0], dtype=tiles.dtype)
    for block, columns in tiles.walk(columns_outermost=hidden_whole):
        weight = tiles.weight(columns)
        d_logits = _logits_gradient(tiles, state, block, columns, weight)
        factor = d_logits.to(tiles.operand_dtype)
        if d_hidden is not None:
            d_hidden.add(block, factor, weight)
            if hidden_done is not None and tiles.is_last(block, columns):
                hidden_done(d_hidden.finish())
        if d_weight is not None:
            d_weight.add(columns, factor.T, tiles.hidden(block))
        if d_bias is not None:
            d_bias[columns] += d_logits.sum(0)
    if d_bias is not None and head.bias is not None:
        d_bias = d_bias.to(_gradient_dtype(head.bias, tiles, needs))
    return Gradients(
        hidden=None if d_hidden is None else d_hidden.finish(),
        weight=None if d_weight is None else d_weight.finish(),
        bias=d_bias,
    )


def _gradient_dtype(leaf: Tensor, tiles: LogitTiles, needs: Needs) -> torch.dtype:
    return tiles.dtype if needs.in_logits_dtype else leaf.dtype


class _OnlineSums:
    """Max, sum of exponentials and their dot product with the shifted logits, tile after tile."""

    def __init__(self, ids: Tensor, dtype: torch.dtype, want: Want):
        count = ids.shape[0]
        self.ids = ids
        self.want = want
        self.peak = torch.full((count,), -torch.inf, dtype=dtype, device=ids.device)
        self.total = torch.zeros_like(self.peak)
        self.dot = torch.zeros_like(self.peak) if want.entropy else self.peak.new_zeros(0)
        if want.statistics:
            self.squares = torch.zeros_like(self.peak)
            self.plain = torch.zeros_like(self.peak)
            self.best = torch.zeros_like(ids)
        # An id that no tile holds leaves NaN.
        self.target = torch.full_like(self.peak, torch.nan)

    def absorb(self, block: slice, columns: slice, z: Tensor, scratch: Tensor) -> None:
        """Take in one tile of logits; z is overwritten."""
        inside, local = _targets(self.ids[block], columns)
        picked = z.gather(1, local[:, None]).squeeze(1)
        self.target[block] = torch.where(inside, picked, self.target[block])
        if self.want.statistics:
            self._take_plain(block, columns, z)
        peak = torch.maximum(self.peak[block], z.amax(1))
        base = torch.where(peak == -torch.inf, 0, peak)
        step = torch.clamp(self.peak[block] - base, min=_VERY_NEGATIVE)
        decay = step.exp()
        z.sub_(base[:, None]).clamp_(min=_VERY_NEGATIVE)
        weights = torch.exp(z, out=tile_view(scratch, *z.shape))
        total = weights.sum(1)
        if self.want.statistics:
            self.squares[block] = decay.square() * self.squares[block] + weights.square().sum(1)
        if self.want.entropy:
            moved = decay * (self.dot[block] + step * self.total[block])
            self.dot[block] = moved + weights.mul_(z).sum(1)
        self.total[block] = decay * self.total[block] + total
        self.peak[block] = peak

    def _take_plain(self, block: slice, columns: slice, z: Tensor) -> None:
        """The sum of a tile's logits, and the first column at which they are largest so far."""
        top, column = z.max(1)
        better = top > self.peak[block]
        self.best[block] = torch.where(better, column + columns.start, self.best[block])
        self.plain[block] += z.sum(1)

    def statistics(self, vocab_size: int) -> Tensor:
        """[3, n], as contract.Scores."""
        log_sum_sq = self.squares.log() - 2 * self.total.log()
        top = (self.best == self.ids) & ~self.total.isnan()
        return torch.stack([log_sum_sq, self.plain / vocab_size, top.to(log_sum_sq.dtype)])


@dataclass(frozen=True)
class _RowState:
    """What pass 2 knows of each row it computes."""

    ids: Tensor
    max: Tensor
    log_sum: Tensor
    entropies: Tensor
    g: Tensor | None
    h: Tensor | None

    @staticmethod
    def select(
        saved: Saved, g: Tensor | None, h: Tensor | None, rows: Tensor | None
    ) -> "_RowState":
        return _RowState(
            ids=select(saved.action_ids, rows).to(torch.int64),
            max=select(saved.max, rows),
            log_sum=select(saved.log_sum, rows),
            entropies=saved.entropies if h is None else select(saved.entropies, rows),
            g=None if g is None else select(g, rows),
            h=None if h is None else select(h, rows),
        )


def _logits_gradient(
    tiles: LogitTiles, state: _RowState, block: slice, columns: slice, weight: Tensor
) -> Tensor:
    """Gradient of one tile of hidden @ weight.T + bias."""
    head = tiles.head
    log_p = tiles.logits(block, columns, weight)
    factor = tiles.temperature_factor(block)
    slope = None
    if head.softcap is not None:
        capped = log_p if factor is None else log_p / factor
        slope = capped.div(head.softcap).square_().neg_().add_(1)
    log_p.sub_(state.max[block, None]).sub_(state.log_sum[block, None])
    log_p.clamp_(min=_VERY_NEGATIVE)
    grad = torch.exp(log_p, out=tile_view(tiles.scratch, *log_p.shape))
    if state.h is None:
        assert state.g is not None
        grad.mul_(-state.g[block, None])
    else:
        log_p.add_(state.entropies[block, None]).mul_(-state.h[block, None])
        grad.mul_(log_p if state.g is None else log_p.sub_(state.g[block, None]))
    if state.g is not None:
        inside, local = _targets(state.ids[block], columns)
        entry = grad.gather(1, local[:, None]).squeeze(1)
        entry += torch.where(inside, state.g[block], 0)
        grad.scatter_(1, local[:, None], entry[:, None])
    for chain in (slope, factor, head.logit_scale):
        if chain is not None:
            grad.mul_(chain)
    return grad


def _targets(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Whether each id lies in the tile, and its column there (any column where it does not)."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return inside, (ids - columns.start).clamp(0, columns.stop - columns.start - 1)


def _rows_with_coefficient(g: Tensor | None, h: Tensor | None) -> Tensor | None:
    """Indices of the rows that need pass 2, or None for all. NaN is not zero: it stays visible."""
    nonzero = [coefficient != 0 for coefficient in (g, h) if coefficient is not None]
    rows = (nonzero[0] if len(nonzero) == 1 else nonzero[0] | nonzero[1]).nonzero().squeeze(1)
    return None if rows.numel() == nonzero[0].numel() else rows


def _scatter(values: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """Selected rows back at their places; every other row is exactly 0."""
    if rows is None:
        return values
    return values.new_zeros((count, *values.shape[1:])).index_copy_(0, rows, values)

"""The two passes of a head by Triton: allocation, order of launches, chunking."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.tiles import tile_for
from ..contract import Gradients, Head, HiddenDone, Needs, Saved, Scores, Want
from . import lists
from .blocks import even_part
from .gradients import gradients
from .launch import Part, merge, score

FORWARD_BYTES = 31 * 1024 * 1024
"""Pass 1 takes no more than this for its temporaries, however large chunk_bytes is; with the few
numbers a row that it returns, less than 32 MiB."""


def forward(
    head: Head,
    action_ids: Tensor,
    mask: Tensor | None,
    *,
    want: Want,
    bad_ids: Tensor | None = None,
) -> Scores:
    """Pass 1 (contract.py). No host read.

    Temporaries: the partials and the active rows of a launch, at most min(chunk_bytes, 31 MiB)
    together but at least one row tile, and 4 N bytes of row numbers if there is a mask.
    """
    hidden = head.hidden
    if not _is_on_current_device(hidden):
        with torch.cuda.device(hidden.device):
            return forward(head, action_ids, mask, want=want, bad_ids=bad_ids)
    N = hidden.shape[0]
    logps = hidden.new_empty(N, dtype=torch.float32)
    peak, log_sum = torch.empty_like(logps), torch.empty_like(logps)
    entropies = torch.empty_like(logps) if want.entropy else logps.new_empty(0)
    statistics = hidden.new_empty((3, N if want.statistics else 0), dtype=torch.float32)
    if bad_ids is None:
        bad_ids = hidden.new_empty((), dtype=torch.int64)
    if want.statistics:
        # Inactive rows keep it: nothing else writes there.
        statistics.zero_()
    scores = Scores(logps, entropies, peak, log_sum, bad_ids, statistics)
    if N == 0:
        return scores._replace(bad_ids=bad_ids.zero_())
    _score_all(_with_dense_bias(head), action_ids, mask, scores, want)
    return scores


def _score_all(head: Head, ids: Tensor, mask: Tensor | None, scores: Scores, want: Want) -> None:
    """Score and merge all active rows, as many at a time as the budget allows."""
    hidden, dtype = head.hidden, head.compute_dtype
    N, H = hidden.shape
    tile = tile_for(hidden.device, dtype, hidden.dtype, head.weight.dtype)
    quantities = 2 + want.entropy + 3 * want.statistics
    segments = -(-head.vocab_size // tile.columns)
    row_bytes = 4 * quantities * segments + (H * dtype.itemsize if mask is not None else 0)
    most = min(head.chunk_bytes, FORWARD_BYTES) // row_bytes
    at_once = min(even_part(N, most, tile.rows), N)
    partials = hidden.new_empty((at_once, quantities, segments), dtype=torch.float32)
    for chosen, start, rows, count in _active_rows(head, ids, mask, scores, at_once):
        part = Part(chosen, start, rows, count, partials, tile, want)
        score(head, part)
        merge(head, part, ids, scores)


def _active_rows(
    head: Head, ids: Tensor, mask: Tensor | None, scores: Scores, at_once: int
) -> Iterator[tuple[Tensor, int, Tensor | None, Tensor | None]]:
    """(hidden, start, rows, active) as a Part's, for one after another: at_once rows each.

    With a mask each is a copy in the same memory.
    """
    hidden = head.hidden
    N, H = hidden.shape
    if mask is None:
        for start in range(0, N, at_once):
            yield hidden[start : start + at_once], start, None, None
        return
    copy = hidden.new_empty((at_once, H), dtype=head.compute_dtype)
    if at_once == N <= lists.PICKED_AT_ONCE:
        yield copy, 0, *lists.pick_active(head, ids, mask, scores, copy)
        return
    rows, count = lists.list_active(mask, ids, scores, head.vocab_size)
    for start in range(0, N, at_once):
        part = copy[: N - start]
        lists.gather_rows(hidden, rows, count, part, start)
        yield part, start, rows, count


def backward(
    head: Head,
    saved: Saved,
    grad_logps: Tensor | None,
    grad_entropies: Tensor | None,
    *,
    needs: Needs,
    hidden_done: HiddenDone | None = None,
) -> Gradients:
    """Pass 2 (contract.py). One host read; none of a small head or while a CUDA graph is captured.

    Rows whose gradients are exactly zero (NaN is not) are left out, or where the host does not read
    how many they are, computed as zeros.
    """
    if not _is_on_current_device(head.hidden):
        with torch.cuda.device(head.hidden.device):
            return backward(
                head, saved, grad_logps, grad_entropies, needs=needs, hidden_done=hidden_done
            )
    if not saved.action_ids.is_contiguous():
        saved = saved._replace(action_ids=saved.action_ids.contiguous())
    g, h = (None if grad is None else grad.contiguous() for grad in (grad_logps, grad_entropies))
    return gradients(_with_dense_bias(head), saved, (g, h), needs, hidden_done)


def _with_dense_bias(head: Head) -> Head:
    """Kernels walk through the bias without a stride."""
    if head.bias is None or head.bias.is_contiguous():
        return head
    return replace(head, bias=head.bias.contiguous())


def _is_on_current_device(tensor: Tensor) -> bool:
    """Whether launches go where the tensor is: kernels run on the current GPU."""
    return not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()

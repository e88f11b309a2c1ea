"""The Triton backend of the two passes: allocation, order of launches, chunking.

Importing this module needs no Triton; the kernels are imported when a pass runs.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .blocks import even_part
from .contract import Gradients, Head, HiddenDone, Needs, Saved, Scores, Want

FORWARD_BYTES = 31 * 1024 * 1024
"""Pass 1 takes no more than this for its temporaries, however large chunk_bytes is; with the few
numbers a row that it returns, less than 32 MiB."""


def unavailable_reason(device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Why this backend can't compute in this dtype on this device, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if compute_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in bfloat16, float16 and float32, not in {compute_dtype}"
    if device.type == "cpu":
        from triton import knobs

        return None if knobs.runtime.interpret else "the tensors are on the CPU"
    if device.type != "cuda":
        return f"it has no kernels for device type {device.type!r}"
    capability = torch.cuda.get_device_capability(device)
    if not torch.version.hip and capability < (8, 0):
        return f"the GPU's compute capability is {capability}, and 8.0 is needed"
    return None


def forward(head: Head, action_ids: Tensor, mask: Tensor | None, *, want: Want) -> Scores:
    """Pass 1 (contract.py). No host read.

    Temporaries: the partials and the active rows of a launch, at most min(chunk_bytes, 31 MiB)
    together but at least one row tile, and 4 N bytes of row numbers if there is a mask.
    """
    N, device = head.hidden.shape[0], head.hidden.device
    logps, top, log_sum = (torch.empty(N, dtype=torch.float32, device=device) for _ in range(3))
    entropies = torch.empty(N if want.entropy else 0, dtype=torch.float32, device=device)
    bad_ids = torch.empty((), dtype=torch.int64, device=device)
    statistics = torch.empty(3, N if want.statistics else 0, dtype=torch.float32, device=device)
    if want.statistics:
        # Inactive rows keep it: nothing else writes there.
        statistics.zero_()
    scores = Scores(logps, entropies, top, log_sum, bad_ids, statistics)
    if N == 0:
        return scores._replace(bad_ids=bad_ids.zero_())
    with _on_device(head.hidden):
        _score_all(_with_dense_bias(head), action_ids, mask, scores, want)
    return scores


def _score_all(head: Head, ids: Tensor, mask: Tensor | None, scores: Scores, want: Want) -> None:
    """Score and merge all active rows, as many at a time as the budget allows."""
    from ..kernels.tiles import tile_for
    from .triton_launch import Part, merge, score

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
    from .triton_lists import PICKED_AT_ONCE, gather_rows, list_active, pick_active

    hidden = head.hidden
    N, H = hidden.shape
    if mask is None:
        for start in range(0, N, at_once):
            yield hidden[start : start + at_once], start, None, None
        return
    copy = hidden.new_empty((at_once, H), dtype=head.compute_dtype)
    if at_once == N <= PICKED_AT_ONCE:
        yield copy, 0, *pick_active(head, ids, mask, scores, copy)
        return
    rows, count = list_active(mask, ids, scores, head.vocab_size)
    for start in range(0, N, at_once):
        part = copy[: N - start]
        gather_rows(hidden, rows, count, part, start)
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
    """Pass 2 (contract.py). One host read; none while a CUDA graph is captured.

    Rows whose gradients are exactly zero are left out (NaN is not zero).
    """
    from .triton_gradients import gradients

    saved = saved._replace(action_ids=saved.action_ids.contiguous())
    g, h = (None if grad is None else grad.contiguous() for grad in (grad_logps, grad_entropies))
    with _on_device(head.hidden):
        return gradients(_with_dense_bias(head), saved, (g, h), needs, hidden_done)


def _with_dense_bias(head: Head) -> Head:
    """Kernels walk through the bias without a stride."""
    if head.bias is None or head.bias.is_contiguous():
        return head
    return replace(head, bias=head.bias.contiguous())


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's GPU, whichever is current."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)

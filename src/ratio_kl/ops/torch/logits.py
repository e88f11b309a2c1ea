"""Ratio and KL of logits that the caller holds, in eager PyTorch, a block of active rows at a time.

    ratio = exp(logp - old)      kl = exp(delta) - delta - 1,  delta = ref_logp - logp
    dlogits = c (onehot - p),    c = dratio ratio + dkl (1 - exp(delta))

Never stored: a second copy of the logits. Inactive rows are never read.
"""

import torch
from torch import Tensor

from ..contract import LogitsSaved, LogitsScores

_BLOCK_BYTES = 16 * 1024 * 1024
"""Size of the float copy of a block of rows: small enough to stay in a cache between its uses."""


def forward(
    policy_logits: Tensor, ref_logits: Tensor, action_ids: Tensor, mask: Tensor, old_logps: Tensor
) -> LogitsScores:
    """Ratio and KL at each row; tensors are [..., V] and [...], mask bool, the rest any dtype."""
    dtype = _accumulation_dtype(policy_logits)
    zeros = torch.zeros(action_ids.shape, dtype=dtype, device=policy_logits.device)
    logps, delta, peak, log_sum = zeros, zeros.clone(), zeros.clone(), zeros.clone()
    vocab_size = policy_logits.shape[-1]
    # A narrow dtype would wrap the vocabulary's size.
    action_ids = action_ids.to(torch.int64)
    bad_ids = (mask & ((action_ids < 0) | (action_ids >= vocab_size))).sum()
    for rows in _row_blocks(mask, policy_logits):
        ids = action_ids[rows]
        logps[rows], peak[rows], log_sum[rows] = _selected_logps(policy_logits[rows], ids, dtype)
        delta[rows] = _selected_logps(ref_logits[rows], ids, dtype)[0] - logps[rows]
    # Results in the order of the shape, as a compiler was told, whatever the mask's strides are.
    log_ratio = torch.where(mask.contiguous(), logps - old_logps.to(dtype), 0)
    return LogitsScores(
        ratio=log_ratio.exp(),
        kl=torch.expm1(delta) - delta,
        max=peak,
        log_sum=log_sum,
        delta=delta,
        bad_ids=bad_ids,
    )


def backward(
    policy_logits: Tensor,
    action_ids: Tensor,
    mask: Tensor,
    saved: LogitsSaved,
    grad_ratio: Tensor | None,
    grad_kl: Tensor | None,
) -> Tensor:
    """Gradient of policy_logits, in its dtype; exactly 0 on inactive rows."""
    coefficient = torch.zeros_like(saved.ratio)
    if grad_ratio is not None:
        coefficient += grad_ratio * saved.ratio
    if grad_kl is not None:
        coefficient -= grad_kl * torch.expm1(saved.delta)
    gradient = torch.zeros(
        policy_logits.shape, dtype=policy_logits.dtype, device=policy_logits.device
    )
    for rows in _row_blocks(mask & (coefficient != 0), policy_logits):
        log_p = policy_logits[rows].to(saved.max.dtype)
        log_p = log_p.sub_(saved.max[rows][:, None]).sub_(saved.log_sum[rows][:, None])
        block = log_p.exp_().mul_(-coefficient[rows][:, None])
        # An id out of range was reported; it must not become an out-of-range write.
        ids = action_ids[rows].to(torch.int64).clamp(0, block.shape[1] - 1)[:, None]
        block.scatter_(1, ids, block.gather(1, ids) + coefficient[rows][:, None])
        gradient[rows] = block.to(gradient.dtype)
    return gradient


def _selected_logps(
    logits: Tensor, ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """log-probability of each id, max and log_sum of each row; NaN for an id out of range.

    `logits` is a block of rows of the caller's own, and is overwritten.
    """
    logits = logits.to(dtype)
    inside = (ids >= 0) & (ids < logits.shape[1])
    target = logits.gather(1, torch.where(inside, ids, 0)[:, None]).squeeze(1)
    peak = logits.amax(1)
    base = torch.where(peak == -torch.inf, 0, peak)
    log_sum = logits.sub_(base[:, None]).exp_().sum(1).log_()
    logps = torch.clamp((target - peak) - log_sum, max=0)
    return torch.where(inside, logps, torch.nan), peak, log_sum


def _row_blocks(rows: Tensor, logits: Tensor) -> list[tuple[Tensor, ...]]:
    """Indices of the rows marked in `rows`, in blocks whose float copies fit the budget."""
    row_bytes = (logits.itemsize + _accumulation_dtype(logits).itemsize) * logits.shape[-1]
    step = max(1, _BLOCK_BYTES // row_bytes)
    indices = rows.nonzero()
    return [block.unbind(1) for block in indices.split(step)] if indices.numel() else []


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32

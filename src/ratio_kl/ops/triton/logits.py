"""ratio_kl on logits by Triton: allocation, and one launch each way."""

import torch
from torch import Tensor

from ...kernels.ratio_kl import ratio_kl_backward_kernel, ratio_kl_kernel
from ..contract import LogitsSaved, LogitsScores
from .call import Arguments, call

LANES, WIDTH = 512, 8
"""Forward: lanes of a program, and the columns that each reads at once (16 bytes in 16 bits)."""

BLOCK_V = 4096
"""Backward: columns of a program."""


def forward(
    policy_logits: Tensor, ref_logits: Tensor, action_ids: Tensor, mask: Tensor, old_logps: Tensor
) -> LogitsScores:
    """Ratio and KL at each row: logits [N, V] or [B, T, V] of any strides, the rest without V.

    mask is bool. No host read.
    """
    device, shape = policy_logits.device, action_ids.shape
    ratio, kl, peak, log_sum, delta = (
        torch.empty(shape, dtype=torch.float32, device=device) for _ in range(5)
    )
    bad = torch.empty(shape, dtype=torch.int8, device=device)
    rows = action_ids.contiguous(), mask.contiguous().view(torch.int8), old_logps.contiguous()

    def arguments() -> Arguments:
        strides = *_strides(policy_logits), *_strides(ref_logits)
        integers = shape[-1], policy_logits.shape[-1], *strides
        return Arguments(shape.numel(), integers, {"LANES": LANES, "WIDTH": WIDTH}, warps=8)

    if action_ids.numel() > 0:
        sources = (policy_logits, ref_logits, *rows, ratio, kl, peak, log_sum, delta, bad)
        key = _layouts(policy_logits, ref_logits, action_ids, old_logps)
        with torch.cuda.device_of(policy_logits):
            call(ratio_kl_kernel, key, sources, arguments)
    return LogitsScores(ratio, kl, peak, log_sum, delta, bad.sum())


def backward(
    policy_logits: Tensor,
    action_ids: Tensor,
    mask: Tensor,
    saved: LogitsSaved,
    grad_ratio: Tensor | None,
    grad_kl: Tensor | None,
) -> Tensor:
    """Gradient of policy_logits, contiguous and in its dtype; exactly 0 on inactive rows."""
    gradient = torch.empty(
        policy_logits.shape, dtype=policy_logits.dtype, device=policy_logits.device
    )
    rows = action_ids.contiguous(), mask.contiguous().view(torch.int8)
    # As the imaginary part of a conjugate, torch negates a gradient as it reads it.
    grads = (g if g is None else g.resolve_neg().contiguous() for g in (grad_ratio, grad_kl))

    def arguments() -> Arguments:
        V = policy_logits.shape[-1]
        programs = action_ids.numel() * -(-V // BLOCK_V)
        integers = action_ids.shape[-1], V, *_strides(policy_logits)
        return Arguments(programs, integers, {"BLOCK_V": BLOCK_V}, warps=8)

    if gradient.numel() > 0:
        numbers = (entry.contiguous() for entry in saved)
        sources = (policy_logits, *rows, *numbers, *grads, gradient)
        key = _layouts(policy_logits, action_ids)
        with torch.cuda.device_of(policy_logits):
            call(ratio_kl_backward_kernel, key, sources, arguments)
    return gradient


def _layouts(*tensors: Tensor) -> tuple[object, ...]:
    return tuple((t.dtype, t.shape, t.stride()) for t in tensors)


def _strides(logits: Tensor) -> tuple[int, ...]:
    """Strides (batch, token, column); an [N, V] tensor is a batch of one."""
    return (0, *logits.stride()) if logits.dim() == 2 else logits.stride()

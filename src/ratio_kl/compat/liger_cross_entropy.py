"""Liger's cross entropy of a head, `LigerFusedLinearScaledCrossEntropyFunction`."""

from typing import Literal

import torch
from torch import Tensor

from ..checks.arguments import check_device, check_floating, check_integer
from ..checks.values import check_counts
from ..config import check_int, check_real_option
from ..ops.contract import DEFAULT_CHUNK_BYTES
from ..ops.linear_logprob import linear_logprob
from ..ops.passes import logits_dtype_of


class LigerFusedLinearScaledCrossEntropyFunction:
    """The class of this name in `liger_kernel.ops`: its `apply`."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
        *,
        backend: Literal["torch", "triton"] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> Tensor | tuple[Tensor, ...]:
        """Negative log-likelihood of each target under softmax(_input @ weight.T / temperature).

        Args:
            _input: [M, H].
            weight: [V, H].
            target: [M] int; at ignore_index all outputs are 0 and no gradient flows.
            temperature: > 0.
            m_tiles_per_cluster: no effect.
            return_entropy: give entropies, too.
            selected_token_ids: [K] int, in [0, V): give the log-probabilities of these tokens.
            backend, chunk_bytes: as in linear_logprob; Liger has no such arguments.

        Returns:
            nll [M]; or a tuple of it, entropy [M] if asked for, and selected [M, K] if asked for.
            float32 (float64 for float64 inputs), all differentiable in _input and weight.

        Raises:
            ValueError, TypeError: as linear_logprob; an id of selected_token_ids out of range.

        Reference: Liger-Kernel 0.8.5, liger_kernel/ops/fused_linear_scaled_cross_entropy.py.
        """
        temperature = check_real_option("temperature", temperature)
        check_int("ignore_index", ignore_index)
        if not -(2**63) <= ignore_index < 2**63:
            raise ValueError(f"ignore_index must fit 64 bits; got {ignore_index!r}")
        if check_floating("_input", _input).dim() != 2:
            raise ValueError(f"_input must have shape [M, H]; got {list(_input.shape)}")
        active = check_integer("target", target) != ignore_index
        scores = linear_logprob(
            _input,
            weight,
            target,
            active,
            temperature=temperature,
            return_entropy=return_entropy,
            backend=backend,
            chunk_bytes=chunk_bytes,
        )
        outputs = [-scores.logps]
        if return_entropy:
            outputs.append(scores.entropies)
        if selected_token_ids is not None:
            chosen = _check_chosen(selected_token_ids, weight.shape[0], _input.device)
            # What stands in an ignored row must not reach the weight's gradient.
            hidden = torch.where(active[:, None], _input, 0)
            target = target.where(active, 0).long()
            moved = _moved_to(chosen, hidden, weight, target, temperature)
            selected = torch.where(active[:, None], scores.logps[:, None] + moved, 0)
            outputs.append(selected.clamp(max=0))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _check_chosen(ids: Tensor, vocab_size: int, device: torch.device) -> Tensor:
    # A narrow dtype would wrap the vocabulary's size, and an index of bytes is a mask.
    ids = check_integer("selected_token_ids", ids).long()
    check_device("selected_token_ids", ids, device, owner="_input")
    if ids.dim() != 1:
        raise ValueError(f"selected_token_ids must have shape [K]; got {list(ids.shape)}")
    if not torch.compiler.is_compiling():
        outside = (ids < 0) | (ids >= vocab_size)

        def error(count: int) -> ValueError:
            return ValueError(
                f"selected_token_ids must lie in [0, {vocab_size}); got {count} outside that range"
            )

        check_counts(outside.sum(), error, "later")
    return ids


def _moved_to(
    chosen: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, temperature: float
) -> Tensor:
    """log p(c) - log p(t) = z_c - z_t of each chosen token c and each row's target t, [M, K].

    The difference of two logits needs no further pass over the vocabulary.
    """
    dtype, last = logits_dtype_of(hidden, weight), weight.shape[0] - 1
    rows = hidden.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        of_chosen = rows @ weight[chosen.clamp(0, last)].to(dtype).T
    of_target = (rows * weight[target.clamp(0, last)].to(dtype)).sum(-1)
    moved = (of_chosen - of_target[:, None]) / temperature
    return torch.where((chosen < 0) | (chosen > last), torch.nan, moved)

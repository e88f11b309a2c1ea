"""grads="forward": both passes run in forward, and backward only hands their gradients on.

Nothing reads hidden or weight once forward has returned, so a sharded weight needs to be gathered
around forward only (ZeRO-3). The price is one stashed gradient of each leaf between the passes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..distributed.shared_sum import ANCHOR
from ..ops.contract import Needs, Want
from ..ops.passes import HeadRows, RowScores, pass_one, pass_two
from .surrogate import LossOutput


def loss_with_stashed_gradients(
    rows: HeadRows, surrogate: Callable[[RowScores], LossOutput]
) -> LossOutput:
    """The loss of `surrogate(scores)`, its gradients computed now.

    Args:
        rows: flat rows with their leaves attached to the caller's graph.
        surrogate: from the scores of pass 1 to the loss.

    Raises:
        RuntimeError: under torch.compile, which cannot trace a gradient taken in forward.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            'grads="forward" is for eager mode and cannot be compiled; use grads="backward" '
            "under torch.compile"
        )
    leaves = (rows.hidden, rows.weight, rows.bias)
    with torch.no_grad():
        scores = pass_one(rows, Want(entropy=True))
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        logps = scores.logps.detach().requires_grad_()
        entropies = scores.entropies.detach().requires_grad_()
        output = surrogate(scores._replace(logps=logps, entropies=entropies))
        g, h = torch.autograd.grad(output.loss, (logps, entropies), allow_unused=True)
    with torch.no_grad():
        # fp16 cannot hold a gradient before the loss scale has multiplied it.
        half = any(leaf is not None and leaf.dtype == torch.float16 for leaf in leaves)
        hidden, weight, bias = (leaf is not None and leaf.requires_grad for leaf in leaves)
        gradients = pass_two(rows, scores, g, h, Needs(hidden, weight, bias, half))
    loss = _HandOn.apply(*leaves, ANCHOR, output.loss.detach(), *gradients)
    # A trainer may scale its loss in place, and _HandOn keeps its result.
    return output._replace(loss=loss.clone())


def _as_it_is(tensor: Tensor) -> Tensor:
    """What is saved for a backward that runs at once: not offloaded, nor, under checkpointing, made
    again by another forward."""
    return tensor


class _HandOn(torch.autograd.Function):
    """Value `loss`, and the given gradients times grad_output for hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, anchor, loss, d_hidden, d_weight, d_bias):
        result = loss.clone()
        ctx.save_for_backward(result, d_hidden, d_weight, d_bias)
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in (hidden, weight, bias)]
        return result

    @staticmethod
    def backward(ctx, grad_output):
        result, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():
            grad_output = _Once.apply(grad_output, result)
        scaled = (
            None if gradient is None else (gradient * grad_output).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None


class _Once(torch.autograd.Function):
    """grad_output as it is; asking for its gradient is asking for a second derivative."""

    @staticmethod
    def forward(ctx, grad_output, result):
        return grad_output.clone()

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "ratio_kl has no double backward: the gradients made in forward cannot be "
            "differentiated again. Use create_graph=False, or full logits for second derivatives"
        )

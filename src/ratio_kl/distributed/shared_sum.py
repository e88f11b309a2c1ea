"""A sum over ranks with a gradient: y = sum over ranks of x, so dx = sum over ranks of dy.

Each rank holds its own part of the loss, and the loss is the sum of the parts. So what a rank's x
does to the loss, it does through the y of every rank: backward adds the ranks' gradients up. Both
sums are taken in the order of the ranks, so that groups which add the same numbers get the same
bits.
"""

import torch
from torch import Tensor

from .groups import Group, add_in_order, gather_over

ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
"""A leaf whose gradient is 0. What hangs on it runs backward even where nothing else asks for it,
which the other ranks' collectives may wait for."""


def shared_sum(tensor: Tensor, group: Group | None) -> Tensor:
    """Sum of `tensor` over the ranks of the group, differentiable; itself for None.

    Every rank of the group must call it, and run its backward if one does (`attached` sees to
    that). The same shape and dtype on every rank.
    """
    return tensor if group is None else _shared_sum(tensor, group.name, group.size)


def attached(tensor: Tensor) -> Tensor:
    """`tensor`, but requiring a gradient under grad mode whatever it was computed from."""
    if tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _attached(tensor, ANCHOR)


@torch.library.custom_op("ratio_kl::shared_sum", mutates_args=())
def _shared_sum(tensor: Tensor, group: str, ranks: int) -> Tensor:
    return add_in_order(gather_over(tensor, Group(group, ranks)))


@_shared_sum.register_fake
def _(tensor, group, ranks):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("ratio_kl::attached", mutates_args=())
def _attached(tensor: Tensor, anchor: Tensor) -> Tensor:
    return tensor.clone()


@_attached.register_fake
def _(tensor, anchor):
    return torch.empty_like(tensor)


@torch.library.custom_op("ratio_kl::anchor_grad", mutates_args=())
def anchor_grad(made: Tensor) -> Tensor:
    """The gradient of ANCHOR, which keeps a compiler from dropping what made `made`."""
    return torch.zeros_like(ANCHOR, requires_grad=False)


@anchor_grad.register_fake
def _(made):
    return torch.empty((), device="cpu")


def _save_group(ctx, inputs, output) -> None:
    _, ctx.group, ctx.ranks = inputs


_shared_sum.register_autograd(
    lambda ctx, grad: (_shared_sum(grad, ctx.group, ctx.ranks), None, None),
    setup_context=_save_group,
)
_attached.register_autograd(
    lambda ctx, grad: (grad, anchor_grad(grad)), setup_context=lambda ctx, inputs, output: None
)

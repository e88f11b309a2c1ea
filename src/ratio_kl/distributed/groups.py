"""Which ranks a call communicates with, and the collectives that it may use.

The functional collectives are called as operators, by group name: they are what torch.compile
traces without a graph break and what a CUDA graph can hold. None of them carries a gradient.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Group(NamedTuple):
    """A group of more than one rank. None, in its place, means that nothing is communicated."""

    name: str
    """The name under which torch.distributed knows the group on every rank."""
    size: int
    """Number of ranks, > 1."""


def resolve(process_group: object = None, *, name: str = "process_group") -> Group | None:
    """The group that a `process_group` argument means now; `name` is what the caller calls it.

    Args:
        process_group: None for the default group where torch.distributed is initialised and no
            communication elsewhere; "local" for no communication; or a ProcessGroup.

    Returns:
        Group, or None where nothing is to be communicated (a group of one rank, too).

    Raises:
        TypeError: anything else, the placeholder that torch.distributed.new_group returns on
            ranks outside the new group included.
    """
    if isinstance(process_group, str) and process_group == "local":
        return None
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        process_group = dist.group.WORLD
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            f"{name} must be None (the default group), 'local' (no communication) or a "
            "torch.distributed.ProcessGroup that this rank belongs to; got "
            f"{process_group!r} of type {type(process_group).__name__}"
        )
    if process_group.size() == 1:
        return None
    return Group(process_group.group_name, process_group.size())


def world_size(group: Group | None) -> int:
    """Number of ranks of the group; 1 for None."""
    return 1 if group is None else group.size


def sum_over(tensor: Tensor, group: Group | None) -> Tensor:
    """Sum of `tensor` over the ranks of the group; the tensor itself for None.

    Args:
        tensor: any shape, any dtype that the backend can add, the same on every rank.

    Returns:
        A new tensor without a gradient, equal on every rank. The input is not written.
    """
    return _reduce(tensor, "sum", group)


def min_over(tensor: Tensor, group: Group | None) -> Tensor:
    """Elementwise minimum over the ranks of the group; otherwise as `sum_over`."""
    return _reduce(tensor, "min", group)


def gather_over(tensor: Tensor, group: Group | None) -> Tensor:
    """[size, *tensor.shape], row r from rank r. Shapes must be the same on every rank."""
    if group is None:
        return tensor.unsqueeze(0)
    ops = torch.ops._c10d_functional
    flat = tensor.detach().reshape(-1)
    gathered = ops.all_gather_into_tensor(flat, group.size, group.name)
    return ops.wait_tensor(gathered).reshape(group.size, *tensor.shape)


def _reduce(tensor: Tensor, operation: str, group: Group | None) -> Tensor:
    if group is None:
        return tensor
    ops = torch.ops._c10d_functional
    # A collective sends memory as it lies: a view must be packed first.
    packed = tensor.detach().contiguous()
    return ops.wait_tensor(ops.all_reduce(packed, operation, group.name))

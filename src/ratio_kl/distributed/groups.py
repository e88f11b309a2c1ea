"""Which ranks a call communicates with, and the collectives that it may use.

The functional collectives are called as operators, by group name: they are what torch.compile
traces without a graph break and what a CUDA graph can hold. None of them carries a gradient.
"""

from functools import reduce
from itertools import combinations
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    # torch's compiler imports it. Its default arguments are the default group of that moment, which
    # they hold for good: once a group is there, its threads outlive destroy_process_group, and
    # gloo's now and then abort a process that ends (pytorch/pytorch#179291).
    import torch.distributed.nn


class Group(NamedTuple):
    """A group of more than one rank. None, in its place, means that nothing is communicated."""

    name: str
    """The name under which torch.distributed knows the group on every rank."""
    size: int
    """Number of ranks, > 1."""


class Crossed(NamedTuple):
    """The ranks of two groups that have this rank alone in common: a row and a column of a mesh.

    A collective over all of them is one over `first`, then one over `second`.
    """

    first: Group
    second: Group

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.first.size * self.second.size


Ranks: TypeAlias = Group | Crossed


def crossed(first: Group | None, second: Group | None) -> Ranks | None:
    """The ranks of both groups; None counts as this rank alone."""
    if first is None or second is None:
        return first or second
    return Crossed(first, second)


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


def resolve_cut(group: object, *, name: str) -> Group | None:
    """The group over which something is cut, a vocabulary or sequences; None where nothing is.

    Args:
        group: None, or a ProcessGroup; one of a single rank cuts nothing.
        name: of the argument.

    Raises:
        TypeError: anything else.
    """
    if group is None:
        return None
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"{name} must be None or a torch.distributed.ProcessGroup that this rank belongs to; "
            f"got {group!r} of type {type(group).__name__}"
        )
    return resolve(group, name=name)


def check_crossing(**groups: object) -> None:
    """ValueError if two of the named process groups share more ranks than this one.

    What is no ProcessGroup is passed over.
    """
    known = {
        name: set(dist.get_process_group_ranks(group))
        for name, group in groups.items()
        if dist.is_available() and isinstance(group, dist.ProcessGroup)
    }
    for (name, ranks), (other, others) in combinations(known.items(), 2):
        if len(ranks & others) > 1:
            raise ValueError(
                f"{name} and {other} must have this rank alone in common, as a row and a column "
                f"of a mesh; got ranks {sorted(ranks)} and {sorted(others)}"
            )


def world_size(group: Ranks | None) -> int:
    """Number of ranks of the group; 1 for None."""
    return 1 if group is None else group.size


def sum_over(tensor: Tensor, group: Ranks | None) -> Tensor:
    """Sum of `tensor` over the ranks of the group; the tensor itself for None.

    Args:
        tensor: any shape, any dtype that the backend can add, the same on every rank.

    Returns:
        A new tensor without a gradient, equal on every rank. The input is not written.
    """
    return _reduce(tensor, "sum", group)


def min_over(tensor: Tensor, group: Ranks | None) -> Tensor:
    """Elementwise minimum over the ranks of the group; otherwise as `sum_over`."""
    return _reduce(tensor, "min", group)


def gather_over(tensor: Tensor, group: Ranks | None) -> Tensor:
    """[size, *tensor.shape], the ranks in the same order at every call. One shape on all ranks."""
    ops, ranks = torch.ops._c10d_functional, 1
    gathered = tensor.detach().unsqueeze(0)
    for each in _groups(group):
        ranks *= each.size
        flat = ops.all_gather_into_tensor(gathered.reshape(-1), each.size, each.name)
        gathered = ops.wait_tensor(flat).reshape(ranks, *tensor.shape)
    return gathered


def start_sum(tensor: Tensor, group: Group) -> Tensor:
    """Begin to add the ranks' tensors up in `tensor` itself; `wait_for` it before it is read."""
    started: Tensor = torch.ops._c10d_functional.all_reduce_(tensor, "sum", group.name)
    return started


def wait_for(started: Tensor) -> Tensor:
    """The tensor of a collective that `start_sum` began, once what follows may read it."""
    done: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return done


def add_in_order(of_ranks: Tensor) -> Tensor:
    """Sum over the first axis, rank after rank: the same bits whatever the other axes hold."""
    return reduce(torch.add, of_ranks.unbind())


def _groups(ranks: Ranks | None) -> tuple[Group, ...]:
    if ranks is None:
        return ()
    return (ranks,) if isinstance(ranks, Group) else tuple(ranks)


def _reduce(tensor: Tensor, operation: str, ranks: Ranks | None) -> Tensor:
    ops = torch.ops._c10d_functional
    for group in _groups(ranks):
        # A collective sends memory as it lies: a view must be packed first.
        packed = tensor.detach().contiguous()
        tensor = ops.wait_tensor(ops.all_reduce(packed, operation, group.name))
    return tensor

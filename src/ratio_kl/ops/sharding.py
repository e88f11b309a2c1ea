"""What it means that a head is cut over ranks, and the sum of the ranks' gradients of hidden."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..config import check_choice
from ..distributed.groups import Group, resolve_cut, start_sum, wait_for


@dataclass(frozen=True)
class Sharding:
    """A head cut by rows of the vocabulary, in the order of the ranks."""

    group: Group
    whole_hidden_grad: bool
    """Add the ranks' parts of the gradient of hidden up; else each rank gets its own part."""


def check_hidden_grad(tp_hidden_grad: object) -> None:
    """TypeError or ValueError unless it is "whole" or "part"."""
    check_choice("tp_hidden_grad", tp_hidden_grad, ("whole", "part"))


def sharding_of(tp_group: object, tp_hidden_grad: Literal["whole", "part"]) -> Sharding | None:
    """What the arguments tp_group and tp_hidden_grad mean; None where nothing is cut."""
    check_hidden_grad(tp_hidden_grad)
    group = resolve_cut(tp_group, name="tp_group")
    return None if group is None else Sharding(group, tp_hidden_grad == "whole")


class PartOfHidden:
    """This rank's part of the gradient of hidden, on its way to the sum over ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sum: Tensor | None = None

    def start(self, part: Tensor) -> None:
        """Begin to add up, in `part` itself, while the host and the device go on."""
        self.sum = start_sum(part, self.group) if part.numel() > 0 else part

    def finish(self, part: Tensor | None) -> Tensor:
        """The sum over ranks; `part` is taken where nothing was started."""
        if self.sum is None:
            assert part is not None
            self.start(part)
        assert self.sum is not None
        return wait_for(self.sum) if self.sum.numel() > 0 else self.sum

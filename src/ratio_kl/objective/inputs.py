"""The caller's tensors, checked and brought to one form: one clean entry a token.

Values at inactive tokens are selected away here, before anything can exponentiate or multiply
them: whatever stands there changes nothing.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from ..checks.arguments import (
    check_device,
    check_floating,
    check_integer,
    check_real,
    check_scalar,
    check_shape,
)
from ..checks.values import Checks
from ..config import as_float
from ..distributed.groups import Group
from .sequences import Layout, Packed, Padded, packed_mask

Reading = Literal["token", "sequence", "either"]
"""Of an argument that may have one entry a token or one a sequence, by its shape. "either": [B, 1]
where T = 1, and what could_be_either has found; on this rank the two mean the same."""


@dataclass(frozen=True)
class Tokens:
    """A batch in its layout. Tensors are [B, T] (padded) or [N] (packed), on one device."""

    layout: Layout
    caller_shape: tuple[int, ...]
    """Shape of action_ids as the caller holds it: [B, T], [N] or [1, N]."""
    action_ids: Tensor
    mask: Tensor
    """bool."""
    packing_faults: Tensor | None
    """How often cu_seqlens breaks each rule (sequences.py); None for padded input."""
    advantages: Tensor
    """0 on inactive tokens, as are the log-probabilities; in the dtype of the objective."""
    old_logps: Tensor | None
    ref_logps: Tensor | None
    sampling_logps: Tensor | None
    sampling_ratio: Tensor | None
    """1 on inactive tokens."""
    sampling_ratio_reading: Reading
    temperature: Tensor | None
    """1 on inactive tokens; None if the call gave no tensor."""


def read_tokens(
    hidden: Tensor,
    dtype: torch.dtype,
    *,
    action_ids: object,
    attention_mask: object,
    advantages: object,
    old_logps: object,
    ref_logps: object,
    sampling_logps: object,
    sampling_ratio: object,
    temperature: object,
    cu_seqlens: object,
    checks: Checks = "later",
    cp_group: Group | None = None,
) -> Tokens:
    """Check a call's per-token and per-sequence arguments and bring them to one layout.

    Args are those of FusedLinearRatioKLLoss; `hidden` is checked already, `dtype` is that of the
    log-probabilities, and `checks` says when the values of cu_seqlens are looked at; cp_group is
    the ranks over which each sequence is cut. All results are constants of the loss.

    Raises:
        TypeError: a required tensor is missing or is no tensor.
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    layout = _layout(hidden, cu_seqlens, cp_group)
    read = _Reader(layout, hidden.device, dtype)
    ids = check_integer("action_ids", action_ids)
    _check_shift(hidden, ids)
    flat_ids = read.tokens("action_ids", ids)
    mask = read.tokens("attention_mask", attention_mask) != 0
    packing_faults = None
    if isinstance(layout, Packed):
        given = (advantages, sampling_ratio, temperature)
        both = read.could_be_either(given)
        mask, packing_faults = packed_mask(mask, layout.cu_seqlens, both, checks)
    return Tokens(
        layout=layout,
        caller_shape=tuple(ids.shape),
        action_ids=flat_ids,
        mask=mask,
        packing_faults=packing_faults,
        advantages=read.broadcast("advantages", advantages, mask, neutral=0),
        old_logps=read.logps("old_logps", old_logps, mask),
        ref_logps=read.logps("ref_logps", ref_logps, mask),
        sampling_logps=read.logps("sampling_logps", sampling_logps, mask),
        sampling_ratio=(
            None
            if sampling_ratio is None
            else read.broadcast("sampling_ratio", sampling_ratio, mask, neutral=1)
        ),
        sampling_ratio_reading=(
            read.reading(sampling_ratio) if isinstance(sampling_ratio, Tensor) else "either"
        ),
        temperature=(
            read.temperature(temperature, mask) if isinstance(temperature, Tensor) else None
        ),
    )


@dataclass(frozen=True)
class _Reader:
    """Reads per-token and per-sequence arguments in one layout."""

    layout: Layout
    device: torch.device
    dtype: torch.dtype

    def tokens(self, name: str, value: object) -> Tensor:
        """A per-token argument in the layout's shape, its dtype unchanged."""
        tensor = check_real(name, value)
        check_shape(name, tensor, *self._token_shapes())
        check_device(name, tensor, self.device)
        return tensor.reshape(self.layout.shape)

    def logps(self, name: str, value: object, mask: Tensor) -> Tensor | None:
        """Log-probabilities, 0 on inactive tokens."""
        if value is None:
            return None
        tensor = self.tokens(name, check_floating(name, value))
        return torch.where(mask, tensor.detach().to(self.dtype), 0)

    def broadcast(self, name: str, value: object, mask: Tensor, *, neutral: float) -> Tensor:
        """A per-token or per-sequence argument at each token, `neutral` on inactive ones."""
        tensor = check_real(name, value)
        check_shape(name, tensor, *self._token_shapes(), *self._sequence_shapes())
        check_device(name, tensor, self.device)
        values = tensor.detach().to(self.dtype)
        if self.reading(values) == "sequence":
            values = self.layout.spread(self.layout.from_caller(values))
        else:
            values = values.reshape(self.layout.shape)
        return torch.where(mask, values, neutral)

    def temperature(self, value: Tensor, mask: Tensor) -> Tensor:
        """A tensor temperature, 0-d too, at each token."""
        if check_real("temperature", value).dim() > 0:
            return self.broadcast("temperature", value, mask, neutral=1)
        check_device("temperature", value, self.device)
        return torch.where(mask, value.detach().to(self.dtype), 1)

    def reading(self, tensor: Tensor) -> Reading:
        """What a checked argument has one entry of."""
        shape = tuple(tensor.shape)
        per_token = any(shape == known for known, _ in self._token_shapes())
        per_sequence = any(shape == known for known, _ in self._sequence_shapes())
        if per_token and per_sequence:
            return "either"
        return "token" if per_token else "sequence"

    def could_be_either(self, arguments: tuple[object, ...]) -> bool:
        """Whether one is 1-D with N = S entries: one a token and one a sequence."""
        if self.layout.num_sequences != self.layout.shape[0]:
            return False
        return any(isinstance(x, Tensor) and x.shape == self.layout.shape for x in arguments)

    def _token_shapes(self) -> list[tuple[tuple[int, ...], str]]:
        if isinstance(self.layout, Padded):
            return [(self.layout.shape, "[B, T]")]
        tokens = self.layout.shape[0]
        return [((tokens,), "[N]"), ((1, tokens), "[1, N]")]

    def _sequence_shapes(self) -> list[tuple[tuple[int, ...], str]]:
        sequences = self.layout.num_sequences
        return [((sequences,), "[B]"), ((sequences, 1), "[B, 1]")]


def _check_shift(hidden: Tensor, ids: Tensor) -> None:
    """ValueError for hidden states of all tokens beside the ids of all but the first."""
    if hidden.dim() == 3 and ids.shape == (hidden.shape[0], hidden.shape[1] - 1):
        raise ValueError(
            f"action_ids must have shape [B, T] = {list(hidden.shape[:2])}; got {list(ids.shape)}: "
            "row t of hidden must predict action_ids[:, t], so pass hidden[:, :-1]"
        )


def _layout(hidden: Tensor, cu_seqlens: object, cp_group: Group | None) -> Layout:
    if cu_seqlens is None:
        if hidden.dim() != 3:
            raise ValueError(
                "hidden must have shape [B, T, H], or [N, H] with cu_seqlens; got "
                f"{list(hidden.shape)} and cu_seqlens=None"
            )
        return Padded((hidden.shape[0], hidden.shape[1]), ranks=cp_group)
    offsets = check_integer("cu_seqlens", cu_seqlens)
    check_device("cu_seqlens", offsets, hidden.device)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [S + 1]; got {list(offsets.shape)}")
    if (hidden.dim() == 3 and hidden.shape[0] != 1) or hidden.dim() > 3:
        raise ValueError(
            f"hidden must have shape [N, H] or [1, N, H] with cu_seqlens; got {list(hidden.shape)}"
        )
    return Packed((hidden.shape[-2],), offsets.to(torch.int64).contiguous(), ranks=cp_group)


def read_items(value: object, device: torch.device) -> Tensor | float | None:
    """num_items_in_batch as a 0-d tensor, a number, or None.

    Raises:
        TypeError: it is neither.
        ValueError: it is a negative number, or a tensor of bools or of more than one element.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        items = check_scalar("num_items_in_batch", value)
        if items.dtype == torch.bool:
            raise ValueError("num_items_in_batch must have a number's dtype; got torch.bool")
        return items.to(device)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            "num_items_in_batch must be a number, a tensor with one element or None; got "
            f"{value!r} of type {type(value).__name__}"
        )
    number = as_float("num_items_in_batch", value)
    if not 0 <= number < math.inf:
        raise ValueError(f"num_items_in_batch must be >= 0 and finite; got {value!r}")
    return number

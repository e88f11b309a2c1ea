"""Checks of tensor arguments: each error names the argument, what came and what was expected.

Only types, shapes, dtypes and devices are looked at, so nothing waits for a device.
"""

import reprlib

import torch
from torch import Tensor, nn
from torch.distributed import is_available as _distributed_is_available

FLOATING_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensor(name: str, value: object) -> Tensor:
    """TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        hint = "; pass its weight" if isinstance(value, nn.Module) else ""
        shown = reprlib.repr(value)
        raise TypeError(
            f"{name} must be a tensor; got {shown} of type {type(value).__name__}{hint}"
        )
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor; got layout {value.layout}")
    return value


def check_floating(name: str, value: object) -> Tensor:
    """`value` as a floating-point tensor: float64, float32, bfloat16 or float16."""
    tensor = check_tensor(name, value)
    if tensor.dtype not in FLOATING_DTYPES:
        raise ValueError(
            f"{name} must have dtype float64, float32, bfloat16 or float16; got {tensor.dtype}"
        )
    return tensor


def check_integer(name: str, value: object) -> Tensor:
    """`value` as a tensor of integers (bool is none)."""
    tensor = check_tensor(name, value)
    if tensor.dtype not in INTEGER_DTYPES:
        raise ValueError(f"{name} must have an integer dtype; got {tensor.dtype}")
    return tensor


def check_real(name: str, value: object) -> Tensor:
    """`value` as a tensor of bools, integers or floats (not complex, not quantised)."""
    tensor = check_tensor(name, value)
    if tensor.dtype not in (torch.bool, *INTEGER_DTYPES, *FLOATING_DTYPES):
        raise ValueError(f"{name} must have dtype bool, integer or floating; got {tensor.dtype}")
    return tensor


def check_shape(name: str, tensor: Tensor, *expected: tuple[tuple[int, ...], str]) -> None:
    """ValueError unless the shape is one of `expected`, given as (shape, its name in words)."""
    if not any(tuple(tensor.shape) == shape for shape, _ in expected):
        words = " or ".join(f"{word} = {list(shape)}" for shape, word in expected)
        raise ValueError(f"{name} must have shape {words}; got {list(tensor.shape)}")


def check_device(name: str, tensor: Tensor, device: torch.device, *, owner: str = "hidden") -> None:
    """ValueError unless the tensor lies on `device`, that of the argument `owner`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {owner}'s device, {device}; got {tensor.device}")


def check_head(
    hidden: object, weight: object, bias: object, *, prefix: str = ""
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check hidden [..., H], weight [V, H] and bias [V] or None against each other."""
    h_name, w_name, b_name = (prefix + name for name in ("hidden", "weight", "bias"))
    hidden = check_floating(h_name, hidden)
    weight = check_floating(w_name, weight)
    for name, tensor in ((h_name, hidden), (w_name, weight)):
        _refuse_dtensor(name, tensor)
    if weight.numel() == 0:
        raise ValueError(
            f"{w_name} is empty (shape {list(weight.shape)}), expected [V, H]: a sharded weight "
            "(ZeRO-3, FSDP) must be gathered around this call, for instance by calling the loss "
            "inside the model's forward"
        )
    if hidden.dim() < 2:
        raise ValueError(f"{h_name} must have shape [B, T, H] or [N, H]; got {list(hidden.shape)}")
    width = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        looks = ""
        if weight.dim() == 2 and weight.shape[0] == width:
            looks = "; it looks transposed: pass lm_head.weight as it is"
            if width > weight.shape[1]:
                looks = f"; {h_name} looks like logits: pass the last hidden state"
        raise ValueError(
            f"{w_name} must have shape [V, H] with H = {width} as in {h_name}; "
            f"got {list(weight.shape)}{looks}"
        )
    check_device(w_name, weight, hidden.device)
    if bias is None:
        return hidden, weight, None
    bias = check_floating(b_name, bias)
    _refuse_dtensor(b_name, bias)
    check_shape(b_name, bias, ((weight.shape[0],), "[V]"))
    check_device(b_name, bias, hidden.device)
    return hidden, weight, bias


def _refuse_dtensor(name: str, tensor: Tensor) -> None:
    if not _distributed_is_available():
        return
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        raise ValueError(
            f"{name} is a DTensor with placements {tensor.placements}, expected a plain tensor: "
            "call the loss inside the forward of the module that FSDP gathers, or pass "
            f"{name}.full_tensor(grad_placements=[Partial('avg')])"
        )

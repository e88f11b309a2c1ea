"""Checks of tensor arguments: each error names the argument, what came and what was expected.

Only types, shapes, dtypes and devices are looked at, so nothing waits for a device.
"""

import reprlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import is_available as _distributed_is_available
from torch.nn.parameter import is_lazy

FLOATING_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensor(name: str, value: object, *, sharded: bool = False) -> Tensor:
    """TypeError unless `value` is a tensor; `sharded`: a DTensor is looked at by the caller."""
    if not isinstance(value, Tensor):
        hint = "; pass its weight" if isinstance(value, nn.Module) else ""
        shown = reprlib.repr(value)
        raise TypeError(
            f"{name} must be a tensor; got {shown} of type {type(value).__name__}{hint}"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor of " if value.is_nested else ""
        raise ValueError(f"{name} must be a dense tensor; got {kind}layout {value.layout}")
    if not sharded and type(value) is not Tensor and _is_dtensor(value):
        raise ValueError(f"{name} is a DTensor, expected a plain tensor: pass {name}.full_tensor()")
    if not torch.compiler.is_compiling():
        if is_lazy(value):
            raise ValueError(f"{name} must hold numbers; got an uninitialized parameter")
        _refuse_derivatives(name, value)
        if value.is_neg():
            # The imaginary part of a conjugate, say: torch negates as it reads, and kernels do not.
            return value.resolve_neg()
    return value


def _refuse_derivatives(name: str, tensor: Tensor) -> None:
    """No derivative but autograd's backward: others would stop in torch, or be dropped silently."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(
            f"{name} is inside a torch.func transform, which ratio_kl has no rules for; expected a "
            "plain tensor and backward() or torch.autograd.grad"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(
            f"{name} carries a forward-mode tangent, which ratio_kl has no rules for; expected a "
            "plain tensor and backward() or torch.autograd.grad"
        )


def check_floating(name: str, value: object, *, sharded: bool = False) -> Tensor:
    """`value` as a floating-point tensor: float64, float32, bfloat16 or float16."""
    tensor = check_tensor(name, value, sharded=sharded)
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
    return _saveable(tensor)


def _saveable(tensor: Tensor) -> Tensor:
    """A copy where it was made in inference mode, as rollouts are: backward could not save it."""
    if not torch.compiler.is_compiling() and tensor.is_inference() and torch.is_grad_enabled():
        return tensor.clone()
    return tensor


def check_real(name: str, value: object) -> Tensor:
    """`value` as a tensor of bools, integers or floats (not complex, not quantised)."""
    tensor = check_tensor(name, value)
    if tensor.dtype not in (torch.bool, *INTEGER_DTYPES, *FLOATING_DTYPES):
        raise ValueError(f"{name} must have dtype bool, integer or floating; got {tensor.dtype}")
    return _saveable(tensor)


def check_scalar(name: str, value: object) -> Tensor:
    """`value` as a detached 0-d tensor of a real dtype, on any device that holds numbers."""
    tensor = check_real(name, value)
    if tensor.numel() != 1:
        raise ValueError(f"{name} must have one element; got shape {list(tensor.shape)}")
    if tensor.is_meta:
        raise ValueError(f"{name} must hold a number; got a tensor on the meta device")
    return tensor.detach().reshape(())


def check_shape(name: str, tensor: Tensor, *expected: tuple[tuple[int, ...], str]) -> None:
    """ValueError unless the shape is one of `expected`, given as (shape, its name in words)."""
    if not any(tuple(tensor.shape) == shape for shape, _ in expected):
        words = " or ".join(f"{word} = {list(shape)}" for shape, word in expected)
        raise ValueError(f"{name} must have shape {words}; got {list(tensor.shape)}")


def check_device(name: str, tensor: Tensor, device: torch.device, *, owner: str = "hidden") -> None:
    """ValueError unless the tensor lies on `device`, that of the argument `owner`."""
    if tensor.device == device and device.type == "meta":
        raise ValueError(f"{owner} is on the meta device, which holds no numbers; expected another")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {owner}'s device, {device}; got {tensor.device}")


def check_head(
    hidden: object, weight: object, bias: object, *, prefix: str = "", tp_group: object = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check hidden [..., H], weight [V, H] and bias [V] or None against each other.

    A weight or bias that is a DTensor cut by rows over tp_group comes back as its local rows.
    """
    h_name, w_name, b_name = (prefix + name for name in ("hidden", "weight", "bias"))
    hidden = _plain(h_name, check_floating(h_name, hidden, sharded=True))
    weight = _plain(w_name, check_floating(w_name, weight, sharded=True), tp_group)
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
    bias = _plain(b_name, check_floating(b_name, bias, sharded=True), tp_group)
    check_shape(b_name, bias, ((weight.shape[0],), "[V]"))
    check_device(b_name, bias, hidden.device)
    return hidden, weight, bias


def declared_vocab_size(vocab_size: int | None, weight: object) -> int | None:
    """vocab_size, or where that is None the rows of the whole weight, if it is a DTensor."""
    if vocab_size is None and isinstance(weight, Tensor) and _is_dtensor(weight):
        return weight.shape[0]
    return vocab_size


def _is_dtensor(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, nn.Parameter) or not _distributed_is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _plain(name: str, tensor: Tensor, tp_group: Any = None) -> Tensor:
    """The tensor, or the local rows of a DTensor that is cut by rows over tp_group."""
    if not _is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    if tp_group is None:
        raise ValueError(
            f"{name} is a DTensor with placements {tensor.placements}, expected a plain tensor: "
            "call the loss inside the forward of the module that FSDP gathers, or pass "
            f"{name}.full_tensor(grad_placements=[Partial('avg')])"
        )
    by_rows = tensor.placements == (Shard(0),) and not name.endswith("hidden")
    if not by_rows or mesh.get_group().group_name != tp_group.group_name:
        raise ValueError(
            f"{name} is a DTensor with placements {tensor.placements} on {mesh}, expected a plain "
            "tensor or, of weight and bias, one with placements (Shard(0),) on the mesh of tp_group"
        )
    return tensor.to_local()

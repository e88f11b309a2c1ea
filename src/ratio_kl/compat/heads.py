"""The lm_head module of a transformers model, read as a weight and a bias.

A head that is more than a linear layer is used as it computes (LoRA, a trained copy) or refused;
it is never read as the weight below it.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class LinearHead(NamedTuple):
    """logits = hidden @ weight.T + bias."""

    hidden: Tensor
    """What the weight multiplies: the head's input, beside it the low-rank states of LoRA."""
    weight: Tensor
    bias: Tensor | None


@torch.compiler.disable
def call_head(module: nn.Module, hidden: Tensor, compute: Callable[[LinearHead], Any]) -> Any:
    """`compute` on the head's parameters, run as the forward of `module`.

    The module is called, its forward replaced until it runs, so that whoever hooks it (FSDP2 to
    gather the weight, ZeRO-3, a device map) sees the head at work. A compiler stays out of it: it
    would recompile for each new `compute`.
    """
    structure = None
    own_forward = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if own_forward is not None:
            module.forward = own_forward

    def forward(hidden: Tensor) -> tuple[Any, ...]:
        nonlocal structure
        restore()  # `compute` may call the model, for a reference's logits say
        leaves, structure = tree_flatten(compute(read_head(module, hidden)))
        return tuple(leaves)

    module.forward = forward
    try:
        leaves = module(hidden)
    finally:
        restore()
    assert structure is not None
    return tree_unflatten(leaves, structure)


def read_head(module: nn.Module, hidden: Tensor) -> LinearHead:
    """The head as one linear layer on `hidden`, differentiable in all that it is made of.

    Raises:
        ValueError: it cannot be written as one, or its weight is not on a device.
    """
    _check_forward(module)
    module = _active_copy(module)
    if _is_peft(module, "tuners.lora.Linear"):
        _check_forward(module)
        return _with_lora(module, hidden)
    return _plain(module, hidden)


def _plain(module: nn.Module, hidden: Tensor) -> LinearHead:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(
            "the lm_head must be a torch.nn.Linear, bare, with LoRA on it, or kept whole by PEFT's "
            f"modules_to_save; got {type(module).__module__}.{type(module).__qualname__}, whose "
            "own forward would be left out"
        )
    _check_forward(module)
    weight, bias = module.weight, module.bias
    if weight.is_meta:
        raise ValueError(
            "the lm_head's weight is on the meta device (offloaded or not loaded); it must be on "
            "the device that computes the loss"
        )
    # With a device map the backbone may end on another device than the head.
    return LinearHead(hidden.to(weight.device), weight, bias)


def _check_forward(module: nn.Module) -> None:
    """ValueError if somebody has given this instance another forward than its class has."""
    # accelerate's hooks keep what they replace.
    own = vars(module).get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    if own is None or _widens(own):
        return
    if getattr(own, "__func__", None) is not type(module).forward:
        raise ValueError(
            "the lm_head must have the forward of its class; it has been replaced by "
            f"{getattr(own, '__qualname__', own)}, which would be left out"
        )


def _widens(forward: Any) -> bool:
    """Whether this is TRL's cast_lm_head_to_fp32: the same linear layer on float32 operands."""
    named = getattr(forward, "__name__", "") == "cast_forward_to_fp32"
    return named and forward.__module__.startswith("trl.")


def _active_copy(module: nn.Module) -> nn.Module:
    """What PEFT's modules_to_save runs: the trained copy, or the original where it is disabled."""
    if not _is_peft(module, "utils.other.ModulesToSaveWrapper"):
        return module
    wrapper: Any = module
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return wrapper.original_module
    return wrapper.modules_to_save[wrapper.active_adapters[0]]


def _with_lora(layer: Any, hidden: Tensor) -> LinearHead:
    """h W' + s drop(h) A' B' as one product: [h, s drop(h) A'] times [W, B]'.

    Nothing is rounded into the frozen weight, and the dropout stays where PEFT has it.
    """
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    base = _plain(layer.get_base_layer(), hidden)
    if layer.disable_adapters or layer.merged:
        return base
    states, weights, bias = [base.hidden], [base.weight], base.bias
    for name in (name for name in layer.active_adapters if name in layer.lora_A):
        if name in layer.lora_variant:
            variant = type(layer.lora_variant[name]).__name__
            raise ValueError(
                f"the adapter {name!r} on the lm_head is a {variant}, which is no sum of two "
                "products; expected plain LoRA, or no adapter on the lm_head"
            )
        down, up, scale = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        low_rank = down(layer.lora_dropout[name](base.hidden.to(down.weight.dtype)))
        states.append(low_rank * scale)
        weights.append(up.weight)
        if up.bias is not None:
            bias = up.bias * scale if bias is None else bias + up.bias * scale
    return LinearHead(torch.cat(states, -1), torch.cat(weights, -1), bias)


def _is_peft(module: nn.Module, name: str) -> bool:
    """Whether a module is of PEFT's class `name`; false where nobody has imported PEFT."""
    package = sys.modules.get("peft")
    if package is None:
        return False
    kind: Any = package
    for part in name.split("."):
        kind = getattr(kind, part)
    return isinstance(module, kind)

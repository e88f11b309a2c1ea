"""Every public call with good arguments, and the hostile values that one of them may be given."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ratio_kl import (
    FusedLinearRatioKLLoss,
    high_entropy_mask,
    linear_logprob,
    linear_ratio_kl,
    ratio_kl,
)

B, T, H, V = 2, 3, 4, 7


class Call(NamedTuple):
    """A public function, its arguments, and what kind each is (see HOSTILE)."""

    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    kinds: dict[str, str]
    optional: frozenset[str] = frozenset()


def tensor_of(name: str) -> Tensor:
    """A good value of a tensor argument."""
    if name in ("hidden", "ref_hidden"):
        return torch.randn(B, T, H)
    if name in ("weight", "ref_weight"):
        return torch.randn(V, H)
    if name in ("bias", "ref_bias"):
        return torch.randn(V)
    if name in ("policy_logits", "ref_logits"):
        return torch.randn(B, T, V)
    if name == "action_ids":
        return torch.randint(V, (B, T))
    if name in ("attention_mask", "mask"):
        return torch.ones(B, T)
    return torch.rand(B, T) + 0.5 if name != "cu_seqlens" else torch.tensor([0, 2, B * T])


def made(*names: str, **others: Any) -> dict[str, Any]:
    """Good values of some tensor arguments, and others as they are."""
    return {name: tensor_of(name) for name in names} | others


KINDS = {
    "hidden": "rows",
    "weight": "leaf",
    "bias": "leaf",
    "ref_hidden": "reference",
    "ref_weight": "reference",
    "ref_bias": "reference",
    "action_ids": "ids",
    "attention_mask": "mask",
    "advantages": "number a token",
    "sampling_ratio": "number a token",
    "old_logps": "logps",
    "ref_logps": "logps",
    "sampling_logps": "logps",
    "temperature": "temperature",
    "num_items_in_batch": "count",
    "entropy_coef": "coefficient",
    "cu_seqlens": "offsets",
    "policy_logits": "leaf",
    "ref_logits": "reference",
    "entropies": "logps",
    "mask": "mask",
    "quantile": "share",
    "logit_scale": "factor",
    "softcap": "factor",
    "log_ratio_limit": "factor",
    "vocab_size": "whole",
    "chunk_bytes": "whole",
    "gradient_accumulation_steps": "whole",
    "return_entropy": "flag",
    "return_statistics": "flag",
    "backend": "word",
    "validate": "word",
    "group": "group",
}

_LOSS = partial(FusedLinearRatioKLLoss, beta=0.1, process_group="local", entropy_coef=0.01)
_REQUIRED = ("hidden", "weight", "action_ids", "attention_mask", "advantages")


def _packed() -> dict[str, Any]:
    given = made(*_REQUIRED, "ref_logps")
    flat = {name: value.flatten(0, 1) for name, value in given.items() if name != "weight"}
    return given | flat | {"cu_seqlens": tensor_of("cu_seqlens")}


def _kinds(*names: str) -> dict[str, str]:
    return {name: KINDS[name] for name in names}


CALLS = {
    "FusedLinearRatioKLLoss": Call(
        _LOSS(),
        lambda: made(
            *_REQUIRED,
            "old_logps",
            "ref_logps",
            "sampling_logps",
            "sampling_ratio",
            "bias",
            temperature=torch.full((B, T), 0.7),
            num_items_in_batch=torch.tensor(5),
            entropy_coef=torch.tensor(0.02),
            gradient_accumulation_steps=2,
        ),
        _kinds(
            *_REQUIRED,
            "old_logps",
            "ref_logps",
            "sampling_logps",
            "sampling_ratio",
            "bias",
            "temperature",
            "num_items_in_batch",
            "entropy_coef",
            "gradient_accumulation_steps",
        ),
        frozenset(
            {
                "old_logps",
                "sampling_logps",
                "sampling_ratio",
                "bias",
                "temperature",
                "num_items_in_batch",
                "entropy_coef",
            }
        ),
    ),
    "FusedLinearRatioKLLoss, reference": Call(
        _LOSS(),
        lambda: made(*_REQUIRED, "ref_hidden", "ref_weight", "ref_bias"),
        _kinds("ref_hidden", "ref_weight", "ref_bias"),
        frozenset({"ref_weight", "ref_bias"}),
    ),
    "FusedLinearRatioKLLoss, packed": Call(_LOSS(), _packed, _kinds("cu_seqlens")),
    "linear_logprob": Call(
        linear_logprob,
        lambda: made(
            "hidden",
            "weight",
            "action_ids",
            "attention_mask",
            "bias",
            logit_scale=0.5,
            temperature=torch.full((B, T), 0.7),
            softcap=None,
            vocab_size=V,
            chunk_bytes=2**20,
            return_entropy=True,
            return_statistics=False,
            backend="torch",
            validate="eager",
        ),
        _kinds(
            "hidden",
            "weight",
            "action_ids",
            "attention_mask",
            "bias",
            "temperature",
            "logit_scale",
            "softcap",
            "vocab_size",
            "chunk_bytes",
            "return_entropy",
            "return_statistics",
            "backend",
            "validate",
        ),
        frozenset({"attention_mask", "bias", "softcap", "vocab_size", "backend", "validate"}),
    ),
    "linear_ratio_kl": Call(
        linear_ratio_kl,
        lambda: made(
            "hidden",
            "weight",
            "action_ids",
            "attention_mask",
            "old_logps",
            "ref_logps",
            "bias",
            temperature=torch.full((B, T), 0.7),
            log_ratio_limit=5.0,
        ),
        _kinds(
            "hidden",
            "weight",
            "action_ids",
            "attention_mask",
            "old_logps",
            "ref_logps",
            "bias",
            "temperature",
            "log_ratio_limit",
        ),
        frozenset({"bias", "log_ratio_limit"}),
    ),
    "linear_ratio_kl, reference": Call(
        linear_ratio_kl,
        lambda: made(
            "hidden",
            "weight",
            "action_ids",
            "attention_mask",
            "old_logps",
            "ref_hidden",
            "ref_weight",
            "ref_bias",
        ),
        _kinds("ref_hidden", "ref_weight", "ref_bias"),
        frozenset({"ref_weight", "ref_bias"}),
    ),
    "ratio_kl": Call(
        ratio_kl,
        lambda: made(
            "policy_logits",
            "ref_logits",
            "action_ids",
            "attention_mask",
            "old_logps",
            backend="torch",
        ),
        _kinds(
            "policy_logits", "ref_logits", "action_ids", "attention_mask", "old_logps", "backend"
        ),
        frozenset({"backend"}),
    ),
    "high_entropy_mask": Call(
        high_entropy_mask,
        lambda: made("entropies", "mask", quantile=0.5, group="local"),
        _kinds("entropies", "mask", "quantile", "group"),
        frozenset({"group"}),
    ),
}
"""Functions that take a group of arguments only together appear once for each group."""


class Subclass(Tensor):
    """A tensor subclass that adds nothing."""


class Hostile(NamedTuple):
    """A value made from the good one, for arguments of some kinds, and what must come of it."""

    make: Callable[[Tensor], Any]
    kinds: tuple[str, ...]
    outcome: str
    """"right": the good call's numbers. "refused": ValueError or TypeError that names the
    argument. "visible": numbers that are not finite."""


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    """The value at one active entry."""

    def fill(good: Tensor) -> Tensor:
        spoilt = good.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    return fill


def _overlapping(good: Tensor) -> Tensor:
    """The same numbers, entries and gaps of one memory shared by two views."""
    space = torch.stack([good, good], -1).contiguous()
    return space[..., 0]


def _nested(good: Tensor) -> Tensor:
    """With strides, of which torch warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([good.flatten(), good.flatten()])


TENSORS = (
    "rows",
    "leaf",
    "reference",
    "ids",
    "mask",
    "number a token",
    "logps",
    "temperature",
    "count",
    "coefficient",
    "offsets",
)
SHAPED = tuple(kind for kind in TENSORS if kind not in ("count", "coefficient"))
CONSTANTS = ("reference", "number a token", "logps", "temperature")
NUMBERS = ("factor", "share", "temperature", "coefficient")

HOSTILE = {
    "a list": Hostile(lambda good: good.tolist(), SHAPED, "refused"),
    "a string": Hostile(
        lambda good: "x", (*TENSORS, "factor", "share", "whole", "word", "group"), "refused"
    ),
    "an nn.Module": Hostile(lambda good: nn.Linear(2, 2), TENSORS, "refused"),
    "one dimension more": Hostile(lambda good: good.unsqueeze(-1), SHAPED, "refused"),
    "0-d": Hostile(
        lambda good: good.flatten()[0], tuple(k for k in SHAPED if k != "temperature"), "refused"
    ),
    "one entry more": Hostile(
        lambda good: torch.cat([good, good[:1]]),
        ("ids", "mask", "number a token", "logps", "temperature"),
        "refused",
    ),
    "size 0": Hostile(lambda good: good[:0], tuple(k for k in SHAPED if k != "rows"), "refused"),
    "several elements": Hostile(lambda good: good.expand(2), ("count", "coefficient"), "refused"),
    "complex": Hostile(lambda good: good.to(torch.complex64), TENSORS, "refused"),
    "float8": Hostile(lambda good: good.to(torch.float8_e4m3fn), TENSORS, "refused"),
    "integers": Hostile(
        lambda good: good.long(), ("rows", "leaf", "reference", "logps"), "refused"
    ),
    "floats": Hostile(lambda good: good.float(), ("ids", "offsets"), "refused"),
    "sparse": Hostile(lambda good: good.to_sparse(), SHAPED, "refused"),
    "a nested tensor": Hostile(_nested, TENSORS, "refused"),
    "a lazy module's parameter": Hostile(lambda good: nn.LazyLinear(2).weight, TENSORS, "refused"),
    "on the meta device": Hostile(lambda good: good.to("meta"), TENSORS, "refused"),
    "a tensor subclass": Hostile(lambda good: good.as_subclass(Subclass), TENSORS, "right"),
    "an nn.Parameter": Hostile(
        lambda good: nn.Parameter(good, good.is_floating_point()), TENSORS, "right"
    ),
    "gaps between its entries": Hostile(_overlapping, SHAPED, "right"),
    "transposed memory": Hostile(
        lambda good: good.mT.contiguous().mT if good.dim() > 1 else good, SHAPED, "right"
    ),
    "another float dtype": Hostile(
        lambda good: good.double(), ("number a token", "logps"), "right"
    ),
    "requires a gradient": Hostile(lambda good: good.clone().requires_grad_(), CONSTANTS, "right"),
    "an inference tensor": Hostile(
        lambda good: torch.inference_mode()(torch.clone)(good),
        (*CONSTANTS, "ids", "mask", "offsets"),
        "right",
    ),
    "NaN": Hostile(_filled(math.nan), ("rows", "leaf", "reference", "number a token"), "visible"),
    "inf": Hostile(_filled(math.inf), ("rows", "leaf", "reference"), "visible"),
    "-inf as a temperature": Hostile(_filled(-math.inf), ("temperature",), "refused"),
    "NaN as a temperature": Hostile(_filled(math.nan), ("temperature",), "refused"),
    "0 as a temperature": Hostile(_filled(0.0), ("temperature",), "refused"),
    "the smallest int64": Hostile(_filled(-(2**63)), ("ids", "offsets"), "refused"),
    "the largest int64": Hostile(_filled(2**63 - 1), ("ids", "offsets"), "refused"),
    "the number NaN": Hostile(lambda good: math.nan, (*NUMBERS, "count"), "refused"),
    "the number inf": Hostile(
        lambda good: math.inf, ("temperature", "coefficient", "share", "count"), "refused"
    ),
    "the number -1": Hostile(
        lambda good: -1, ("factor", "share", "temperature", "count", "whole"), "refused"
    ),
    "the number 2**70": Hostile(lambda good: 2**70, ("whole", "share"), "refused"),
    "the number 10**400": Hostile(lambda good: 10**400, (*NUMBERS, "count", "whole"), "refused"),
    "a fraction": Hostile(lambda good: 1.5, ("whole", "share"), "refused"),
    "a bool": Hostile(
        lambda good: True,
        ("factor", "share", "whole", "count", "coefficient", "temperature"),
        "refused",
    ),
    "a tensor for a number": Hostile(
        lambda good: torch.tensor(1.0), ("factor", "share", "whole"), "refused"
    ),
    "a tensor for a number, of several": Hostile(
        lambda good: torch.ones(2), ("factor", "share", "whole", "flag"), "refused"
    ),
    "a number for a bool": Hostile(lambda good: 1, ("flag",), "refused"),
}

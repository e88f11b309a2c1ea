"""Which backend runs an operator. Triton is imported here, at its first use, and nowhere above."""

import importlib.util
from functools import lru_cache
from types import ModuleType

import torch

from ..config import check_choice

BACKENDS = ("torch", "triton")


def check_backend(backend: object) -> None:
    """TypeError or ValueError unless `backend` is None or the name of one."""
    check_choice("backend", backend, BACKENDS, or_none=True)


def backend_for(
    operator: str, requested: str, device: torch.device, dtype: torch.dtype
) -> ModuleType:
    """The module torch.<operator> or triton.<operator>; "" picks Triton where it can run.

    Raises:
        ValueError: the requested backend cannot run here; nothing falls back silently.
    """
    if requested != "torch" and not (requested == "" and device.type == "cpu"):
        reason = triton_unavailable_reason(device, dtype)
        if reason is None:
            return _module("triton", operator)
        if requested == "triton":
            raise ValueError(f"backend='triton' cannot run here: {reason}")
    return _module("torch", operator)


@lru_cache
def _module(backend: str, operator: str) -> ModuleType:
    return importlib.import_module(f".{backend}.{operator}", __package__)


def triton_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton backend cannot compute in `dtype` on `device`; None if it can."""
    return _reason_on_gpu(device, dtype) if device.type == "cuda" else _reason(device, dtype)


def _reason(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    support = importlib.import_module(".triton.support", __package__)
    reason: str | None = support.unavailable_reason(device, dtype)
    return reason


# A GPU does not change; asking it each time would cost as much as a launch.
_reason_on_gpu = lru_cache(_reason)

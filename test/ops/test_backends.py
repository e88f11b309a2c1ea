"""Which backend is taken, and the reasons why Triton cannot be."""

import importlib.util

import pytest
import torch

from ratio_kl.ops import backends
from ratio_kl.ops.torch import linear as torch_backend

CPU = torch.device("cpu")
reason = backends.triton_unavailable_reason


def test_the_cpu_takes_torch_unless_told_otherwise() -> None:
    assert backends.backend_for("linear", "", CPU, torch.float32) is torch_backend
    assert backends.backend_for("linear", "torch", CPU, torch.float32) is torch_backend


def test_a_named_backend_does_not_fall_back() -> None:
    with pytest.raises(ValueError, match="backend='triton' cannot run here: .*float64"):
        backends.backend_for("linear", "triton", CPU, torch.float64)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reason(CPU, torch.float32) == "the package triton is not installed"


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(backends, "_reason_on_gpu", backends._reason)
    gpu = torch.device("cuda", 0)
    assert "(7, 5), and 8.0 is needed" in (reason(gpu, torch.float16) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert reason(gpu, torch.float16) is None


def test_what_triton_cannot_compute_and_where() -> None:
    pytest.importorskip("triton")
    assert "float64" in (reason(CPU, torch.float64) or "")
    assert "meta" in (reason(torch.device("meta"), torch.float32) or "")
    if torch.cuda.is_available():
        assert reason(CPU, torch.float32) == "the tensors are on the CPU"
        assert reason(torch.device("cuda", 0), torch.bfloat16) is None
    else:
        assert reason(CPU, torch.float32) is None

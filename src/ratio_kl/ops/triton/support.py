"""Where the Triton backend can run, and why not elsewhere."""

import torch
from triton import knobs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unavailable_reason(device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Why the Triton backend can't compute in this dtype on this device, or None if it can."""
    if compute_dtype not in DTYPES:
        return f"it computes in bfloat16, float16 and float32, not in {compute_dtype}"
    if device.type == "cpu":
        return None if knobs.runtime.interpret else "the tensors are on the CPU"
    if device.type != "cuda":
        return f"it has no kernels for device type {device.type!r}"
    capability = torch.cuda.get_device_capability(device)
    if not torch.version.hip and capability < (8, 0):
        return f"the GPU's compute capability is {capability}, and 8.0 is needed"
    return None

"""Time, memory and error of the Triton kernels, in units of the matrix product that they contain.

1 mm is the time of torch.mm(hidden, weight.T) at the same shape, in the same run: what logits
cost before anything is done with them. All times of a table are taken in turns, in random order;
each is a median.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ratio_kl import linear_logprob
from ratio_kl.ops.contract import DEFAULT_CHUNK_BYTES, Head, LogitsSaved, Needs, Saved, Scores, Want
from ratio_kl.ops.triton import linear as triton_backend
from ratio_kl.ops.triton import logits as triton_logits

from .measure import host_time, interleaved

SHAPES = ((8192, 4096, 131072), (32768, 2048, 151936), (16384, 3584, 152064), (4096, 8192, 128256))
HOST_LIMIT = 150
WARM_CALLS = 20
TRAINED, FROZEN = Needs(True, True, False), Needs(True, False, False)


class Step(NamedTuple):
    """What a forward and backward need: a head, actions, a mask, dloss/dlogp."""

    head: Head
    ids: Tensor
    mask: Tensor | None
    grads: Tensor

    def forward(self, with_entropy: bool = True) -> Scores:
        return triton_backend.forward(self.head, self.ids, self.mask, want=Want(with_entropy))

    def both(self, needs: Needs = TRAINED) -> Any:
        scores = self.forward()
        saved = Saved(self.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)
        return triton_backend.backward(self.head, saved, self.grads, None, needs=needs)


def make_step(N: int, H: int, V: int, dtype: torch.dtype) -> Step:
    head = Head(
        hidden=torch.randn(N, H, device="cuda", dtype=dtype),
        weight=torch.empty(V, H, device="cuda", dtype=dtype).normal_(std=0.02),
        bias=None,
        inverse_temperature=None,
        logit_scale=None,
        softcap=None,
        vocab_size=V,
        compute_dtype=dtype,
        chunk_bytes=DEFAULT_CHUNK_BYTES,
    )
    ids = torch.randint(V, (N,), device="cuda")
    return Step(head, ids, None, torch.randn(N, device="cuda") / N)


def sparse(step: Step, active: float, nonzero: float) -> Step:
    """Only a share of the rows active, and only a share of those with a non-zero coefficient."""
    N = step.ids.shape[0]
    draw = torch.randperm(N, device="cuda") / N
    mask = draw < active if active < 1 else None
    return step._replace(mask=mask, grads=step.grads * (draw < active * nonzero))


def times(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each, taken in turns in random order behind a steady load."""
    steps = {name: lambda _, f=function: f() for name, function in functions.items()}
    for function in functions.values():
        function()
    timings = interleaved(steps, torch.device("cuda"), seconds)
    return {name: timing.median for name, timing in timings.items()}


def extra_bytes(function: Callable[[], Any]) -> int:
    """Peak of a call beyond what it leaves behind."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return extra


def errors(step: Step, rows: int = 1024) -> dict[str, float]:
    """Against float64: logps and entropies (largest), gradients (relative Frobenius norm)."""
    scores = step.forward()
    gradients = step.both()
    head = step.head
    weight = head.weight.double()
    d_weight = torch.zeros_like(weight)
    worst_logp = worst_entropy = square = norm = 0.0
    for start in range(0, step.ids.shape[0], rows):
        part = slice(start, start + rows)
        hidden, ids = head.hidden[part].double(), step.ids[part, None]
        log_p = (hidden @ weight.T).log_softmax(-1)
        logps, p = log_p.gather(1, ids)[:, 0], log_p.exp()
        entropies = -(p * log_p).sum(-1)
        worst_logp = max(worst_logp, (scores.logps[part] - logps).abs().max().item())
        worst_entropy = max(worst_entropy, (scores.entropies[part] - entropies).abs().max().item())
        g = step.grads[part, None].double()
        dz = p.mul_(-g).scatter_add_(1, ids, g)
        del log_p
        d_weight.addmm_(dz.T, hidden)
        d_hidden = dz @ weight
        square += (gradients.hidden[part] - d_hidden).square().sum().item()
        norm += d_hidden.square().sum().item()
    off = 0.0
    for start in range(0, d_weight.shape[0], 16384):
        part = slice(start, start + 16384)
        off += (gradients.weight[part] - d_weight[part]).square().sum().item()
    return {
        "logp": worst_logp,
        "entropy": worst_entropy,
        "d_hidden": (square / norm) ** 0.5,
        "d_weight": off**0.5 / d_weight.norm().item(),
    }


def shape_table(N: int, H: int, V: int, seconds: float) -> None:
    """One shape: each variant's time in ms and mm, extra memory, errors."""
    step = make_step(N, H, V, torch.bfloat16)
    head = step.head
    half_active, half_zero = sparse(step, 0.5, 1), sparse(step, 1, 0.5)
    quarter, entropy_masked = sparse(step, 0.5, 0.5), sparse(step, 0.5, 0.2)
    variants: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(head.hidden, head.weight.T),
        "forward, with entropy": step.forward,
        "forward, logps only": lambda: step.forward(with_entropy=False),
        "forward + backward": step.both,
        "... half inactive": half_active.both,
        "... half zero advantage": half_zero.both,
        "... half inactive, half of the rest zero": quarter.both,
        "... half inactive, q = 0.2": entropy_masked.both,
        "... frozen weight": lambda: step.both(FROZEN),
    }
    measured = times(variants, seconds)
    memory = {name: extra_bytes(f) for name, f in variants.items() if name != "mm"}
    print(f"\nN={N} H={H} V={V} bf16; 1 mm = {measured['mm']:.2f} ms")
    for name, extra in memory.items():
        ms = measured[name]
        print(f"  {name:42s} {ms:8.2f} ms {ms / measured['mm']:6.3f} mm  +{extra / 2**20:6.0f} MiB")
    print("  errors:", ", ".join(f"{name} {error:.1e}" for name, error in errors(step).items()))
    in_fp16 = make_step(N, H, V, torch.float16)
    measured = times({"bf16": step.both, "fp16": in_fp16.both}, seconds)
    print(f"  fp16 forward + backward: {measured['fp16'] / measured['bf16']:.3f} of bf16's time")


def host_table(N: int = 256, H: int = 1024, V: int = 32_000) -> None:
    """How long the host takes for a pass, whose kernels take less: on an idle device, each call.

    Microseconds; a pass may take HOST_LIMIT.
    """
    step = make_step(N, H, V, torch.bfloat16)
    half = sparse(step, 0.5, 1)

    def second(of: Step) -> Callable[[], Any]:
        scores = of.forward(with_entropy=False)
        saved = Saved(of.ids, scores.logps, scores.max, scores.log_sum, scores.entropies)
        return lambda: triton_backend.backward(of.head, saved, of.grads, None, needs=TRAINED)

    leaves = [leaf.clone().requires_grad_() for leaf in (step.head.hidden, step.head.weight)]

    def whole() -> None:
        torch.autograd.grad(linear_logprob(*leaves, step.ids).logps.sum(), leaves)

    calls: dict[str, Callable[[], Any]] = {
        "torch.mm": lambda: torch.mm(step.head.hidden, step.head.weight.T),
        "pass 1": lambda: step.forward(with_entropy=False),
        "pass 1, half inactive": lambda: half.forward(with_entropy=False),
        "pass 2": second(step),
        "pass 2, half inactive": second(half),
        "linear_logprob": lambda: linear_logprob(step.head.hidden, step.head.weight, step.ids),
        "linear_logprob and its backward": whole,
    }
    print(f"\nhost's time of a call, N={N} H={H} V={V}; of a pass at most {HOST_LIMIT} us")
    for name, call in calls.items():
        for _ in range(WARM_CALLS):
            call()
        us = host_time(lambda _, call=call: call(), step.ids.device)
        verdict = "" if not name.startswith("pass") else "pass" if us <= HOST_LIMIT else "FAIL"
        print(f"  {name:32s} {us:6.0f} us  {verdict}")


def logits_table(seconds: float, B: int = 16, T: int = 512, V: int = 131072) -> None:
    """ratio_kl on logits that exist, against eager PyTorch in float32 and in their own dtype."""
    policy, ref = (torch.randn(B, T, V, device="cuda", dtype=torch.float16) for _ in range(2))
    ids = torch.randint(V, (B, T), device="cuda")
    mask = torch.ones(B, T, dtype=torch.bool, device="cuda")
    old, g = torch.randn(B, T, device="cuda") - 10, torch.randn(B, T, device="cuda")

    def eager(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        index = ids[..., None]
        logp = policy.to(dtype).log_softmax(-1).gather(-1, index)[..., 0].float()
        ref_logp = ref.to(dtype).log_softmax(-1).gather(-1, index)[..., 0].float()
        delta = (ref_logp - logp).masked_fill(~mask, 0)
        return (logp - old).masked_fill(~mask, 0).exp(), delta.exp() - delta - 1

    scores = triton_logits.forward(policy, ref, ids, mask, old)
    saved = LogitsSaved(scores.ratio, scores.delta, scores.max, scores.log_sum)
    variants: dict[str, Callable[[], Any]] = {
        "copy of one tensor": lambda: policy.clone(),
        "forward": lambda: triton_logits.forward(policy, ref, ids, mask, old),
        "backward": lambda: triton_logits.backward(policy, ids, mask, saved, g, g),
        "eager forward, float32": lambda: eager(torch.float32),
        "eager forward, float16": lambda: eager(torch.float16),
    }
    measured = times(variants, seconds)
    print(f"\nratio_kl on logits, B={B} T={T} V={V} fp16: two tensors read, or one and one written")
    inputs = torch.cuda.memory_allocated()
    for name, ms in measured.items():
        rate = 2 * policy.numel() * policy.itemsize / ms / 1e9
        peak = (inputs + extra_bytes(variants[name])) / 2**30
        print(f"  {name:24s} {ms:7.2f} ms  {rate:5.2f} TB/s  peak {peak:5.1f} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.kernels", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of rounds for each table")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU")
        return 0
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {sys.version.split()[0]}; python -m benchmark.kernels {shlex.join(sys.argv[1:])}"
    )
    for shape in SHAPES[: arguments.shapes]:
        shape_table(*shape, arguments.seconds)
        torch.cuda.empty_cache()
    host_table()
    logits_table(arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The whole loss on a GPU: compiled in every mode, in a captured graph, and its memory there."""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ratio_kl import FusedLinearRatioKLLoss, linear_logprob

pytestmark = [
    pytest.mark.gpu,
    # inductor uses what newer releases of torch have deprecated, and has advice on float32.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*max_autotune.*:UserWarning"),
    # torch captures one to reserve memory.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

B, T, H, V = 8, 40, 96, 1000
"""Several tiles of 128 x 256 with a tail on both sides; a packed batch of the same 320 tokens."""

BFLOAT16 = 2.0**-7
"""One rounding of a gradient to bfloat16 either way, relative to the largest of its tensor."""

LOSSES = {
    "grpo": {"loss_type": "grpo", "beta": 0.1, "delta": 1.5},
    "bnpo": {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 40},
    "dapo": {"loss_type": "dapo", "softcap": 5.0, "top_entropy_quantile": 0.4, "beta": 0.04},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3, "entropy_coef": 0.05},
    "sapo": {"loss_type": "sapo", "off_policy_mask_threshold": 0.1},
    "vespo": {"loss_type": "vespo", "beta": 0.1, "kl_estimator": "k1"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence_token"},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def unpoisoned(monkeypatch: pytest.MonkeyPatch, poisoned_allocations: None) -> None:
    """A compiler, and a graph under capture, must see torch's own allocations."""
    monkeypatch.undo()


class Batch:
    """Leaves and arguments of a call: a quarter of the tokens inactive."""

    def __init__(self, seed: int, *, packed: bool = False, length: int = T) -> None:
        random = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device="cuda")

        self.hidden = normal(B, length, H).bfloat16().requires_grad_()
        self.weight = (normal(V, H) * H**-0.5).bfloat16().requires_grad_()
        ids = torch.randint(V, (B, length), generator=random, device="cuda")
        mask = torch.rand(B, length, generator=random, device="cuda") > 0.25
        old = normal(B, length) * 0.3 - 7
        self.tensors = [ids, mask, normal(B), old, old + 0.1 * normal(B, length)]
        self.options: dict[str, Tensor] = {}
        if packed:
            flat = [x.flatten(0, 1) if x.dim() > 1 else x for x in self.tensors]
            self.tensors = flat
            self.hidden = self.hidden.detach().flatten(0, 1).requires_grad_()
            self.options["cu_seqlens"] = torch.arange(B + 1, device="cuda") * length

    def run(self, loss_fn: Callable[..., Any], **options: Any) -> list[Tensor]:
        out = loss_fn(self.hidden, self.weight, *self.tensors, **self.options, **options)
        gradients = torch.autograd.grad(out.loss, [self.hidden, self.weight])
        return [out.loss.detach(), out.logps, out.entropies, *gradients]


def made(**options: Any) -> FusedLinearRatioKLLoss:
    return FusedLinearRatioKLLoss(**options, process_group="local", backend="triton")


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(
        ("loss", "logps", "entropies", "hidden", "weight"), actual, expected, strict=True
    ):
        assert b.isfinite().all(), name
        # The loss is a sum of terms of size 1 that cancel.
        size = b.double().abs().max().clamp(min=1.0 if name == "loss" else 1e-6)
        off = (a.double() - b.double()).abs().max() / size
        assert off <= (BFLOAT16 if name in ("hidden", "weight") else 1e-5), f"{name}: {off:.1e}"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES.keys())
def test_compiled_equals_eager(options: dict[str, Any], dynamic: bool, packed: bool) -> None:
    loss_fn, batch = made(**options), Batch(1, packed=packed)
    compiled = torch.compile(loss_fn, fullgraph=True, dynamic=dynamic)
    assert_same(batch.run(compiled), batch.run(loss_fn))


# "max-autotune" replays a CUDA graph, into which the host's read of pass 2 must not fall.
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_the_compiler(mode: str) -> None:
    loss_fn = made(**LOSSES["dapo"])
    compiled = torch.compile(loss_fn, fullgraph=True, mode=mode)
    for seed in range(4):
        batch = Batch(seed)
        torch.compiler.cudagraph_mark_step_begin()
        actual = [x.clone() for x in batch.run(compiled)]
        assert_same(actual, batch.run(loss_fn))


def test_lengths_and_numbers_do_not_recompile() -> None:
    """50 lengths, 50 temperatures, 50 coefficients (A47: fla-org/flash-linear-attention#533)."""
    counter = CompileCounterWithBackend("inductor")
    loss_fn = made(**LOSSES["dapo"])
    compiled = torch.compile(loss_fn, fullgraph=True, backend=counter)
    for length in range(17, 67):
        batch = Batch(length, length=length)
        assert_same(batch.run(compiled), batch.run(loss_fn))
    lengths = counter.frame_count
    assert lengths <= 3
    batch = Batch(0)
    for step in range(50):
        for option in ({"temperature": 0.5 + step / 50}, {"entropy_coef": 0.01 * (step + 1)}):
            assert_same(batch.run(compiled, **option), batch.run(loss_fn, **option))
    assert counter.frame_count - lengths <= 6


def test_kernels_are_compiled_a_constant_number_of_times() -> None:
    """A length, temperature or epsilon is no new kernel (A47: facebookresearch/xformers#1037)."""
    from ratio_kl.ops.triton import call as triton_call

    for length in (32, 33, 40, 64):
        Batch(length, length=length).run(made(loss_type="dapo", temperature=0.9))
    before = len(triton_call._compiled)
    for step in range(50):
        config = {"temperature": 0.5 + step / 50, "epsilon_low": 0.1 + step / 100}
        Batch(step, length=17 + step).run(made(loss_type="dapo", **config))
    # Integers that are multiples of 16, or 1, are cases of their own.
    assert len(triton_call._compiled) - before <= 12


def peak_of(step: Callable[[], Any]) -> int:
    step()
    # Nothing older may be freed in between: what an earlier test left to the collector, or this
    # step's gradients, which autograd's thread lets go of a little later than the caller.
    gc.collect()
    torch.cuda.synchronize()
    time.sleep(0.1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# N = 4096, V = 65,536: full logits would be 512 MiB in bfloat16, the temporaries are held to 64.
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiler_adds_no_memory(checkpointed: bool) -> None:
    hidden = torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(65536, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(65536, (8, 512), device="cuda")
    mask = torch.rand(8, 512, device="cuda") > 0.25
    advantages = torch.randn(8, device="cuda")
    options = {"process_group": "local", "chunk_bytes": 2**26}
    loss_fn = FusedLinearRatioKLLoss(top_entropy_quantile=0.5, **options)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return loss_fn(hidden, weight, ids, mask, advantages).loss

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        if checkpointed:
            return checkpoint(loss, hidden, weight, use_reentrant=False)
        return loss(hidden, weight)

    peaks = []
    for call in (whole, torch.compile(whole, fullgraph=True)):
        peaks.append(peak_of(lambda call=call: torch.autograd.grad(
            call(hidden, weight), [hidden, weight]
        )))  # fmt: skip
    gradients = hidden.nbytes + weight.nbytes
    assert peaks[0] < gradients + 2**27
    assert peaks[1] <= 1.1 * peaks[0]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["dapo", "vespo", "bnpo"])
def test_a_captured_graph_replays_with_other_inputs(name: str, packed: bool) -> None:
    """Forward and backward in one CUDA graph; then other hidden states, ids, mask, advantages."""
    loss_fn, static = made(**LOSSES[name]), Batch(0, packed=packed)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            static.run(loss_fn)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = static.run(loss_fn)
    for seed in (1, 2):
        fresh = Batch(seed, packed=packed)
        if seed == 2:
            fresh.tensors[1][: len(fresh.tensors[1]) // 2] = False
        with torch.no_grad():
            static.hidden.copy_(fresh.hidden)
            static.weight.copy_(fresh.weight)
            for old, new in zip(static.tensors, fresh.tensors, strict=True):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = fresh.run(loss_fn)
        assert_same(captured, expected)
        inactive = ~fresh.tensors[1]
        assert not captured[3][inactive].any()


@pytest.mark.parametrize(
    ("advantage", "loss"), [(1.0, -1.2), (-1.0, 485165195.40979)], ids=["clipped", "limited"]
)
def test_a02_gradients_of_a_ratio_far_off(advantage: float, loss: float) -> None:
    """0 * inf in the branch that min() did not pick (MakazhanAlpamys/Soup#1084).

    With A > 0 the clipped branch wins. With A < 0 the ratio wins, held at exp(20) by the limit.
    Beyond it the gradient is 0 either way.
    """
    batch = Batch(0)
    mask = torch.zeros(B, T, dtype=torch.bool, device="cuda")
    mask[0, 0] = True
    old = torch.full((B, T), -300.0, device="cuda")
    batch.tensors = [batch.tensors[0], mask, torch.full((B,), advantage, device="cuda"), old]
    total, *_, hidden, weight = batch.run(made(loss_type="dapo"))
    assert total.item() == pytest.approx(loss, rel=1e-6)
    assert not hidden.any()
    assert not weight.any()


def test_a45_operands_on_different_devices_are_refused() -> None:
    """Launches on the wrong device (linkedin/Liger-Kernel#1303)."""
    batch = Batch(0)
    ids, mask, advantages, *_ = batch.tensors
    hidden, weight = batch.hidden, batch.weight
    loss_fn = made()
    wrong = {
        "weight": (hidden, weight.cpu(), ids, mask, advantages),
        "action_ids": (hidden, weight, ids.cpu(), mask, advantages),
        "attention_mask": (hidden, weight, ids, mask.cpu(), advantages),
        "advantages": (hidden, weight, ids, mask, advantages.cpu()),
    }
    for name, arguments in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must be on hidden's device, cuda:0; got cpu"):
            loss_fn(*arguments)
    # All on the CPU is another matter: there the PyTorch backend computes.
    on_cpu = linear_logprob(hidden.detach().cpu(), weight.detach().cpu(), ids.cpu())
    assert on_cpu.logps.device.type == "cpu"

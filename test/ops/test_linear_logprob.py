"""The primitive: values, shapes, dtypes, layouts and errors."""

from itertools import product

import pytest
import torch
from torch.distributions import Categorical

from ratio_kl import linear_logprob
from ratio_kl.reference import reference_logprob
from support import BACKENDS, assert_close

FLOAT64 = 1e-12
# The smallest tiles (64 x 64), strips, and everything at once.
CHUNKS = [1, 2, 100_000, 2**28]
# The smallest sizes that are cut into several tiles both ways, with short last ones.
B, T, H, V = 5, 14, 6, 131


def given(dtype: torch.dtype = torch.float64, weight_dtype: torch.dtype | None = None):
    hidden = torch.randn(B, T, H, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, dtype=weight_dtype or dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (B, T))


def assert_agrees(actual, expected, leaves, tolerance: float) -> None:
    """Both results, and the gradients of a sum that weighs every token of both differently."""
    coefficients = torch.randn(actual.logps.shape, dtype=torch.float64)
    totals = []
    for name, a, b in zip(("logps", "entropies"), actual[:2], expected, strict=True):
        assert_close(a, b, tolerance, name)
    for result in (actual, expected):
        totals.append((coefficients * (result[0] + 0.7 * result[1])).sum())
    for name, leaf in leaves.items():
        ours, theirs = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in totals)
        assert_close(ours, theirs, tolerance, f"{name}.grad")


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_against_the_oracle(chunk_bytes: int, masked: bool, bias: bool) -> None:
    hidden, weight, ids = given()
    leaves = {"hidden": hidden, "weight": weight}
    if bias:
        leaves["bias"] = torch.randn(V, dtype=torch.float64).requires_grad_()
    mask = (torch.rand(B, T) > 0.4) if masked else None
    options = {"bias": leaves.get("bias"), "temperature": 0.8, "softcap": 4.0, "logit_scale": 1.5}
    actual = linear_logprob(
        hidden, weight, ids, mask, return_entropy=True, chunk_bytes=chunk_bytes, **options
    )
    assert_agrees(actual, reference_logprob(hidden, weight, ids, mask, **options), leaves, FLOAT64)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_entropies_and_logps_against_categorical(scale: float, chunk_bytes: int) -> None:
    # From nearly uniform to nearly one-hot.
    hidden, weight, ids = given()
    hidden = (hidden.detach() * scale).requires_grad_()
    exact = Categorical(logits=hidden @ weight.T)
    expected = exact.log_prob(ids), exact.entropy()
    actual = linear_logprob(hidden, weight, ids, return_entropy=True, chunk_bytes=chunk_bytes)
    for a, b in zip(actual[:2], expected, strict=True):
        # An entropy near 0 is a difference of numbers of the size of the logits.
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13 * scale)
    assert (actual.logps <= 0).all()
    assert (actual.entropies >= 0).all()


@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_a_large_common_offset_costs_no_digits_of_its_own(offset: float) -> None:
    # max and log_sum apart: one float32 lse near 1e6 would be off by 0.06.
    hidden, weight = torch.ones(2, 1), torch.zeros(V, 1)
    weight[:3, 0] = torch.tensor([1.0, 2.0, 3.0])
    bias = torch.full((V,), offset)
    out = linear_logprob(hidden, weight, torch.tensor([1, 2]), bias=bias, return_entropy=True)
    # Logits near 1e6 are multiples of 1/16: these are whole numbers.
    logps, entropies = reference_logprob(hidden.double(), weight.double(), torch.tensor([1, 2]))
    torch.testing.assert_close(out.logps.double(), logps, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.entropies.double(), entropies, rtol=1e-5, atol=0)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), list(product(DTYPES, repeat=2)))
def test_any_mix_of_dtypes(hidden_dtype, weight_dtype, chunk_bytes: int) -> None:
    hidden, weight, ids = given(hidden_dtype, weight_dtype)
    bias = torch.randn(V, dtype=weight_dtype).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    ours = linear_logprob(
        hidden, weight, ids, bias=bias, return_entropy=True, chunk_bytes=chunk_bytes
    )
    exact = reference_logprob(wide[0], wide[1], ids, bias=wide[2])
    double = torch.float64 in (hidden_dtype, weight_dtype)
    for name, a, b in zip(("logps", "entropies"), ours[:2], exact, strict=True):
        assert a.dtype == (torch.float64 if double else torch.float32)
        assert_close(a, b, FLOAT64 if double else 1e-6, name)  # logits are never rounded
    actual = torch.autograd.grad(ours.logps.sum() + ours.entropies.sum(), [hidden, weight, bias])
    expected = torch.autograd.grad(exact[0].sum() + exact[1].sum(), wide)
    for leaf, a, b in zip((hidden, weight, bias), actual, expected, strict=True):
        assert a.dtype == leaf.dtype
        # Rounded once, to the leaf's dtype: half a unit in the last place of the largest entry.
        unit = torch.finfo(leaf.dtype).eps / 2 + (FLOAT64 if double else 1e-5)
        assert_close(a, b, unit, str(leaf.dtype))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("leaf", DTYPES)
def test_under_autocast(leaf: torch.dtype, device_dtype: torch.dtype, masked: bool) -> None:
    """Both passes: with a mask, the gradients are summed for some rows only."""
    hidden, weight, ids = given(leaf)
    mask = torch.rand(B, T) > 0.4 if masked else torch.ones(B, T, dtype=torch.bool)
    with torch.autocast("cpu", dtype=device_dtype):
        ours = linear_logprob(hidden, weight, ids, mask, return_entropy=True)
        actual = torch.autograd.grad(ours.logps.sum() + ours.entropies.sum(), [hidden, weight])
    assert ours.logps.dtype == (torch.float64 if leaf == torch.float64 else torch.float32)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = [mask * scores for scores in reference_logprob(*wide, ids)]
    # At worst each operand is rounded once to autocast's dtype, over a width of 6.
    bound = FLOAT64 if leaf == torch.float64 else 4 * torch.finfo(device_dtype).eps
    assert_close(ours.logps, exact[0], bound, "logps")
    assert_close(ours.entropies, exact[1], bound, "entropies")
    expected = torch.autograd.grad(exact[0].sum() + exact[1].sum(), wide)
    for a, b in zip(actual[:2], expected, strict=True):
        assert a.dtype == leaf
        assert_close(a, b, max(10 * bound, torch.finfo(leaf).eps), "gradient")


TEMPERATURES = {
    "0-d": lambda: torch.tensor(0.7),
    "[B]": lambda: torch.rand(B) + 0.5,
    "[B, 1]": lambda: torch.rand(B, 1) + 0.5,
    "[B, T]": lambda: torch.rand(B, T) + 0.5,
    "expanded": lambda: (torch.rand(B, 1) + 0.5).expand(B, T),
    "bfloat16": lambda: (torch.rand(B) + 0.5).bfloat16(),
}


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("make", TEMPERATURES.values(), ids=TEMPERATURES.keys())
def test_temperature_shapes(make, chunk_bytes: int) -> None:
    hidden, weight, ids = given()
    temperature = make()
    mask = torch.rand(B, T) > 0.4
    for active in (None, mask):
        actual = linear_logprob(
            hidden, weight, ids, active, temperature=temperature, softcap=3.0,
            return_entropy=True, chunk_bytes=chunk_bytes,
        )  # fmt: skip
        wide = temperature.double()
        expected = reference_logprob(hidden, weight, ids, active, temperature=wide, softcap=3.0)
        assert_agrees(actual, expected, {"hidden": hidden, "weight": weight}, FLOAT64)


def test_temperature_of_flat_rows() -> None:
    hidden, weight, ids = given()
    temperature = torch.rand(B, T).double() + 0.5
    flat = linear_logprob(
        hidden.view(-1, H), weight, ids.view(-1), temperature=temperature.view(-1)
    )
    shaped = linear_logprob(hidden, weight, ids, temperature=temperature)
    assert torch.equal(flat.logps.view(B, T), shaped.logps)


@pytest.mark.parametrize("shape", [(0, H), (0, 3, H), (3, 0, H), (1, H), (1, 1, H)])
def test_shapes_with_little_or_nothing_in_them(shape) -> None:
    hidden = torch.randn(shape).requires_grad_()
    weight = torch.randn(V, H).requires_grad_()
    ids = torch.zeros(shape[:-1], dtype=torch.int64)
    for mask in (None, torch.ones(shape[:-1])):
        out = linear_logprob(hidden, weight, ids, mask, return_entropy=True)
        assert out.logps.shape == out.entropies.shape == shape[:-1]
        grads = torch.autograd.grad(out.logps.sum() + out.entropies.sum(), [hidden, weight])
        assert bool(grads[1].any()) == (ids.numel() > 0)


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.float16, torch.float64])
def test_dtypes_of_ids_and_mask(ids_dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    hidden, weight, ids = given()
    mask = torch.rand(B, T) > 0.4
    plain = linear_logprob(hidden, weight, ids, mask)
    typed = linear_logprob(hidden, weight, ids.to(ids_dtype), mask.to(mask_dtype) * 1)
    assert torch.equal(plain.logps, typed.logps)


def test_masks_that_inference_mode_made_can_be_trained_on() -> None:
    hidden, weight, ids = given()
    plain = torch.rand(B, T) > 0.4
    with torch.inference_mode():
        mask = plain.clone()
    expected = torch.autograd.grad(linear_logprob(hidden, weight, ids, plain).logps.sum(), weight)
    actual = torch.autograd.grad(linear_logprob(hidden, weight, ids, mask).logps.sum(), weight)
    assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1])
def test_lazily_negated_inputs(which: int, backend: str) -> None:
    """torch may keep a sign as a bit beside the numbers, which kernels do not look at."""
    hidden, weight, ids = given(torch.float32)
    negated = [hidden.detach(), weight.detach()]
    lazy = list(negated)
    lazy[which] = torch.complex(*[negated[which]] * 2).conj().imag
    negated[which] = -negated[which]
    assert lazy[which].is_neg()
    ours, expected = (linear_logprob(*x, ids, backend=backend).logps for x in (lazy, negated))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_gradients(backend: str) -> None:
    """Of one token: of more they lie two apart, and were copied without the bit."""
    hidden, weight, ids = given(torch.float32)
    lazy = torch.complex(*torch.ones(2, 1)).conj().imag
    assert lazy.is_neg()
    assert lazy.is_contiguous()
    results = []
    for gradient in (lazy, lazy.resolve_neg()):
        out = linear_logprob(
            hidden[0, :1], weight, ids[0, :1], return_entropy=True, backend=backend
        )
        results.append(torch.autograd.grad(out[:2], [hidden, weight], [gradient, gradient]))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_any_non_zero_mask_is_active() -> None:
    hidden, weight, ids = given()
    mask = torch.zeros(B, T)
    mask[0, 0], mask[1, 2], mask[2, 3] = -1.0, 0.25, torch.nan
    out = linear_logprob(hidden, weight, ids, mask).logps
    assert torch.equal(out != 0, mask != 0)


@pytest.mark.parametrize("coefficient", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
def test_inactive_rows_are_isolated_whatever_gradient_comes_in(coefficient, chunk_bytes) -> None:
    hidden, weight, ids = given()
    mask = torch.rand(B, T) > 0.4
    junk = torch.where(mask[..., None], hidden.detach(), torch.nan).requires_grad_()
    g = torch.where(mask, 1.0, coefficient).double()
    results = []
    for h, i, c in ((hidden, ids, mask.double()), (junk, torch.where(mask, ids, -100), g)):
        out = linear_logprob(h, weight, i, mask, return_entropy=True, chunk_bytes=chunk_bytes)
        # As autograd hands it on: a sum over all tokens, the inactive ones too.
        results.append(torch.autograd.grad(list(out[:2]), [h, weight], [c, 0.5 * c]))
    for name, clean, spoilt in zip(("hidden", "weight"), *results, strict=True):
        assert torch.equal(clean, spoilt), name
    assert not results[1][0][~mask].any()
    assert results[1][0][mask].all()


HIDDEN, WEIGHT, IDS = torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.int64)


def message(name: str, expected: str, got: str) -> str:
    return rf"{name} .*{expected}.*got.*{got}"


REFUSED = [
    ({"hidden": None}, TypeError, message("hidden", "a tensor", "None")),
    ({"hidden": [[1.0]]}, TypeError, message("hidden", "a tensor", "list")),
    ({"hidden": torch.zeros(4)}, ValueError, message("hidden", r"\[B, T, H\]", r"\[4\]")),
    ({"hidden": HIDDEN.long()}, ValueError, message("hidden", "float64", "int64")),
    ({"hidden": HIDDEN.to(torch.complex64)}, ValueError, message("hidden", "float64", "complex")),
    ({"weight": None}, TypeError, message("weight", "a tensor", "None")),
    ({"weight": torch.zeros(4, 7)}, ValueError, r"weight.*got \[4, 7\]; it looks transposed"),
    ({"weight": torch.zeros(4, 3)}, ValueError, r"got \[4, 3\]; hidden looks like logits"),
    ({"weight": torch.zeros(7, 5)}, ValueError, message("weight", "H = 4", r"\[7, 5\]")),
    ({"weight": torch.zeros(7)}, ValueError, message("weight", r"\[V, H\]", r"\[7\]")),
    ({"weight": torch.zeros(0)}, ValueError, r"weight is empty .*\[0\].*sharded.*gathered"),
    ({"weight": torch.zeros(0, 4)}, ValueError, r"weight is empty .*\[0, 4\].*sharded.*gathered"),
    ({"weight": WEIGHT.to("meta")}, ValueError, message("weight", "device, cpu", "meta")),
    ({"weight": WEIGHT.to(torch.int8)}, ValueError, message("weight", "float64", "int8")),
    ({"action_ids": None}, TypeError, message("action_ids", "a tensor", "None")),
    ({"action_ids": IDS.float()}, ValueError, message("action_ids", "integer", "float32")),
    ({"action_ids": IDS.bool()}, ValueError, message("action_ids", "integer", "bool")),
    ({"action_ids": IDS[:, :2]}, ValueError, message("action_ids", r"\[2, 3\]", r"\[2, 2\]")),
    ({"action_ids": IDS.view(-1)}, ValueError, message("action_ids", r"\[2, 3\]", r"\[6\]")),
    ({"action_ids": IDS.to("meta")}, ValueError, message("action_ids", "device, cpu", "meta")),
    ({"action_ids": IDS + 7}, ValueError, r"action_ids .*\[0, 7\).*got 6 active token"),
    ({"attention_mask": [[1]]}, TypeError, message("attention_mask", "a tensor", "list")),
    ({"attention_mask": IDS[0]}, ValueError, message("attention_mask", r"\[2, 3\]", r"\[3\]")),
    ({"attention_mask": IDS.to("meta")}, ValueError, message("attention_mask", "cpu", "meta")),
    ({"bias": torch.zeros(4)}, ValueError, message("bias", r"\[V\] = \[7\]", r"\[4\]")),
    ({"bias": torch.zeros(7, 1)}, ValueError, message("bias", r"\[V\] = \[7\]", r"\[7, 1\]")),
    ({"bias": torch.zeros(7).long()}, ValueError, message("bias", "float64", "int64")),
    ({"bias": torch.zeros(7, device="meta")}, ValueError, message("bias", "device, cpu", "meta")),
    ({"bias": 0.0}, TypeError, message("bias", "a tensor", "float")),
    ({"temperature": 0.0}, ValueError, message("temperature", "> 0", "0.0")),
    ({"temperature": "1"}, TypeError, message("temperature", "number", "str")),
    ({"temperature": None}, TypeError, message("temperature", "number", "None")),
    ({"temperature": True}, TypeError, message("temperature", "number", "bool")),
    ({"temperature": torch.ones(3)}, ValueError, message("temperature", r"\[2, 3\]", r"\[3\]")),
    ({"temperature": torch.zeros(2)}, ValueError, r"temperature must be > 0.*got 6 value"),
    ({"temperature": torch.tensor(-1.0)}, ValueError, r"temperature must be > 0.*got 6 value"),
    ({"temperature": 10**400}, ValueError, r"temperature must fit a float; got a number beyond"),
    ({"temperature": 1e-50}, ValueError, message("temperature", "range of .*float32", "1e-50")),
    ({"temperature": 1e39}, ValueError, message("temperature", "range of .*float32", r"1e\+39")),
    ({"logit_scale": torch.ones(2)}, TypeError, message("logit_scale", "number", "Tensor")),
    ({"softcap": 1e39}, ValueError, message("softcap", "range of .*float32", r"1e\+39")),
    ({"logit_scale": 0}, ValueError, message("logit_scale", "> 0", "0")),
    ({"logit_scale": None}, TypeError, message("logit_scale", "number", "None")),
    ({"softcap": -30.0}, ValueError, message("softcap", "> 0", "-30.0")),
    ({"softcap": "30"}, TypeError, message("softcap", "number", "str")),
    ({"vocab_size": 8}, ValueError, message("vocab_size", "at most .*7", "8")),
    ({"vocab_size": 0}, ValueError, message("vocab_size", "> 0", "0")),
    ({"vocab_size": 3.0}, TypeError, message("vocab_size", "int", "float")),
    ({"chunk_bytes": 0}, ValueError, message("chunk_bytes", "> 0", "0")),
    ({"chunk_bytes": 1e6}, TypeError, message("chunk_bytes", "int", "float")),
    ({"backend": "cuda"}, ValueError, message("backend", "torch, triton", "'cuda'")),
    ({"return_entropy": 1}, TypeError, message("return_entropy", "a bool", "1 of type int")),
    ({"return_statistics": [1]}, TypeError, message("return_statistics", "a bool", "list")),
    ({"validate": "always"}, ValueError, message("validate", "eager or None", "'always'")),
    ({"validate": True}, TypeError, message("validate", "eager or None", "True of type bool")),
    ({"backend": ["torch"]}, TypeError, message("backend", "torch, triton", "of type list")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "error", "match"), REFUSED, ids=[str(i) for i in range(len(REFUSED))]
)
def test_errors_name_the_argument_what_came_and_what_was_expected(wrong, error, match) -> None:
    inputs = {"hidden": HIDDEN, "weight": WEIGHT, "action_ids": IDS}
    with pytest.raises(error, match=match):
        linear_logprob(**(inputs | wrong))


def test_ints_past_64_bits_are_numbers() -> None:
    """torch takes a Python int only where it fits 64 bits."""
    given = (HIDDEN, WEIGHT, IDS)
    options = {"temperature": 2**70, "logit_scale": 2**70, "softcap": 2**71}
    actual = linear_logprob(*given, **options).logps
    wanted = linear_logprob(*given, **{name: float(x) for name, x in options.items()}).logps
    assert torch.equal(actual, wanted)


def test_a_dtensor_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # FSDP2's "mixed Tensor and DTensor" (huggingface/trl#6064): the error says what to pass.
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(WEIGHT.clone(), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"weight is a DTensor .*full_tensor"):
            linear_logprob(HIDDEN, sharded, IDS)
        full = linear_logprob(HIDDEN, sharded.full_tensor(), IDS)
        assert torch.equal(full.logps, linear_logprob(HIDDEN, WEIGHT, IDS).logps)
    finally:
        dist.destroy_process_group()

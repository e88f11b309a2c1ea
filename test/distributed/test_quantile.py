"""masked_quantile against torch.quantile, numpy.quantile and itself cut over ranks.

Results are compared by their bits: a threshold that is off by one rounding moves a tied token
across the mask. Only the sign of zero is put aside, which torch leaves to the sort.
"""

import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from ratio_kl.distributed import quantile
from ratio_kl.distributed.groups import resolve
from ratio_kl.distributed.quantile import masked_quantile

INF, NAN = math.inf, math.nan
LOCAL_ROUTES = pytest.mark.parametrize("route", [None, "histogram"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
QUANTILES = (0.0, 0.2, 1 / 3, 1 - 0.2, 0.999, 1.0)


def bits(tensor):
    """What compares equal exactly if the tensors do bit for bit, with one zero and one NaN."""
    assert tensor.shape == ()
    value = tensor.item()
    return str(tensor.dtype), "nan" if math.isnan(value) else (value + 0.0).hex()


def plain(values, mask, q):
    """torch.quantile of what is active: the definition up to 2**24 values."""
    return torch.quantile(values[mask], q)


def draw(seed, n, dtype, kind):
    """n values and a mask of about half of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, dtype=dtype, generator=generator)
    if kind == "ties":
        values = (2 * values).round()
    if kind == "subnormal":
        values = values * torch.finfo(dtype).tiny
    if kind == "infinite":
        values[torch.rand(n, generator=generator) < 0.1] = INF
    mask = torch.rand(n, generator=generator) < 0.5
    mask[n // 2] = True
    return values, mask


# One rank


@LOCAL_ROUTES
@DTYPES
@pytest.mark.parametrize("kind", ["spread", "ties", "subnormal", "infinite"])
# 1 and 2: no neighbour and one; 17: less than a vector register's worth past 16; 5000: ranks
# whose float32 product with q is rounded.
@pytest.mark.parametrize("n", [1, 2, 17, 5000])
def test_equals_torch_quantile(route, dtype, kind, n):
    values, mask = draw(n, n, dtype, kind)
    for q in QUANTILES:
        found = masked_quantile(values, mask, q, route=route)
        assert bits(found) == bits(plain(values, mask, q)), q


@LOCAL_ROUTES
@DTYPES
@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.tuples(st.floats(width=32), st.booleans()), min_size=1, max_size=40),
    q=st.floats(0, 1),
)
@example(entries=[(0.0, True), (-0.0, True), (-0.0, True)], q=0.75)
@example(entries=[(-INF, True), (INF, True)], q=0.5)
@example(entries=[(NAN, False), (INF, False), (1.0, True)], q=1.0)
def test_equals_torch_quantile_for_any_floats(route, dtype, entries, q):
    values = torch.tensor([value for value, _ in entries], dtype=dtype)
    mask = torch.tensor([active for _, active in entries])
    found = masked_quantile(values, mask, q, route=route)
    expected = plain(values, mask, q) if mask.any() else torch.tensor(INF, dtype=dtype)
    assert bits(found) == bits(expected)


@LOCAL_ROUTES
def test_top_40_percent_beside_high_padding(route):
    """A41: padding's entropy moved the threshold (huggingface/trl#3709)."""
    entropies = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5] + 100 * [9.0])
    mask = torch.arange(105) < 5
    threshold = masked_quantile(entropies, mask, 1 - 0.4, route=route)
    assert ((entropies >= threshold) & mask).nonzero().flatten().tolist() == [3, 4]


@LOCAL_ROUTES
@DTYPES
def test_nothing_active_keeps_nothing(route, dtype):
    for shape in ((0,), (0, 7), (3, 4)):
        values = torch.full(shape, NAN, dtype=dtype)
        found = masked_quantile(values, torch.zeros(shape), 0.5, route=route)
        assert bits(found) == (str(dtype), INF.hex())


@LOCAL_ROUTES
@pytest.mark.parametrize("payload", [0x7FC00000, -0x400000, 0x7F800001], ids=hex)
def test_only_an_active_nan_counts(route, payload):
    """Positive, negative and signalling NaN sort differently as bits."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    values.view(torch.int32)[1] = payload
    mask = torch.tensor([1, 0, 1, 1])
    assert masked_quantile(values, mask, 0.5, route=route) == 3
    for q in (0.0, 0.5, 1.0):
        assert masked_quantile(values, torch.ones(4), q, route=route).isnan()


@LOCAL_ROUTES
def test_infinite_values_beside_padding(route):
    """An active inf is a value, not the filler of what is inactive."""
    values, mask = torch.tensor([INF, 1.0, INF, 5.0, 5.0]), torch.tensor([1, 1, 1, 0, 0])
    assert masked_quantile(values, mask, 0.0, route=route) == 1
    assert masked_quantile(-values, mask, 1.0, route=route) == -1


@LOCAL_ROUTES
def test_zero_has_one_sign(route):
    """Else the threshold's sign would depend on how the sort orders the two zeros."""
    for zeros in ([-0.0] * 4, [0.0, -0.0, 0.0, -0.0]):
        found = masked_quantile(torch.tensor(zeros), torch.ones(4), 0.9, route=route)
        assert not found.signbit()


@LOCAL_ROUTES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision_is_widened(route, dtype):
    values, mask = draw(3, 99, torch.float32, "spread")
    values = values.to(dtype)
    found = masked_quantile(values, mask, 0.3, route=route)
    assert bits(found) == bits(plain(values.float(), mask, 0.3))


@LOCAL_ROUTES
def test_neither_written_nor_differentiated(route):
    values, mask = draw(4, 60, torch.float32, "spread")
    values = values.reshape(6, 10).T.requires_grad_()
    before = values.detach().clone()
    found = masked_quantile(values, mask.reshape(6, 10).T, 0.5, route=route)
    assert not found.requires_grad
    assert torch.equal(values, before)


@LOCAL_ROUTES
@DTYPES
def test_past_the_limit_as_numpy(route, dtype, monkeypatch):
    """A42 in small: with the limit at 1000, 100,003 values whose float32 ranks are inexact."""
    values, mask = draw(5, 200_000, dtype, "spread")
    mask[:] = torch.arange(200_000) < 100_003
    monkeypatch.setattr(quantile, "TORCH_LIMIT", 1000)
    differs = False
    for q in QUANTILES:
        found = masked_quantile(values, mask, q, route=route)
        expected = np.quantile(values[mask].numpy(), q)
        assert bits(found) == bits(torch.tensor(expected)), q
        differs |= bits(found) != bits(plain(values, mask, q))
    assert differs == (dtype == torch.float32), "the two rules must be told apart"


@pytest.mark.slow
@LOCAL_ROUTES
@DTYPES
def test_past_two_to_the_24_as_numpy(route, dtype):
    """A42: torch.quantile refuses 4097 * 4096 values (pytorch/pytorch#64947)."""
    values = torch.rand(4097, 4096, dtype=dtype, generator=torch.Generator().manual_seed(6))
    mask = torch.ones(values.shape, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.8)
    found = masked_quantile(values, mask, 0.8, route=route)
    assert bits(found) == bits(torch.tensor(np.quantile(values.numpy(), 0.8)))


@LOCAL_ROUTES
def test_compiles_in_one_graph_for_all_lengths(route):
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(masked_quantile, fullgraph=True, backend=backend, dynamic=True)
    for n in (40, 41, 3000):
        values, mask = draw(n, n, torch.float32, "ties")
        found = compiled(values, mask, 0.7, route=route)
        assert bits(found) == bits(plain(values, mask, 0.7))
    assert backend.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # inductor's
@LOCAL_ROUTES
def test_compiled_code_rounds_as_eager(route):
    """Inductor's own lerp differs from ATen's in the last bit for 1 draw in 50."""
    compiled = torch.compile(masked_quantile, fullgraph=True, dynamic=True)
    for seed in range(400):
        values, mask = draw(seed, 50 + seed % 3, torch.float32, "spread")
        found = compiled(values, mask, 0.3, route=route)
        assert bits(found) == bits(plain(values, mask, 0.3)), seed


VALUES, MASK = torch.ones(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((VALUES, MASK, -0.1), ValueError, r"quantile must be .*\[0, 1\]; got -0.1"),
        ((VALUES, MASK, NAN), ValueError, "quantile must be .*got nan"),
        ((VALUES, MASK, True), TypeError, "quantile must be .*got True"),
        ((VALUES, MASK, None), TypeError, "quantile must be .*got None"),
        ((VALUES.int(), MASK, 0.5), ValueError, "values must be float64.*got int32"),
        ((VALUES.to(torch.float8_e5m2), MASK, 0.5), ValueError, "values must be.*got float8_e5m2"),
        ((VALUES, MASK[:1], 0.5), ValueError, r"mask must have the shape.*\(2, 3\); got \(1, 3\)"),
        ((VALUES, MASK.to("meta"), 0.5), ValueError, "mask must be on the device.*cpu; got meta"),
        ((VALUES, MASK, 0.5, None, "tree"), ValueError, "route must be .*got 'tree'"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        masked_quantile(*arguments)


# Several ranks

ROUTES = ("gather", "histogram", None)


def share(values, mask, rank, size, seed):
    """This rank's part of a random cut in which the last rank often has nothing at all."""
    cuts = np.random.default_rng(seed).integers(0, len(values) + 1, size - 1)
    if seed % 2:
        cuts[-1] = len(values)
    edges = [0, *sorted(cuts.tolist()), len(values)]
    mine = slice(edges[rank], edges[rank + 1])
    return values[mine], mask[mine]


def thresholds_on_ranks(rank, size, cases):
    group, found = resolve(), []
    for seed, (n, dtype, kind, q, route) in enumerate(cases):
        mine = share(*draw(seed, n, dtype, kind), rank, size, seed)
        found.append(bits(masked_quantile(*mine, q, group, route)))
    return found


def test_however_the_values_are_cut_over_ranks(ranks):
    # 2: fewer values than ranks; 50: several a rank; 3000: ties across all ranks.
    cases = [
        (n, dtype, kind, q, route)
        for n in (2, 50, 3000)
        for dtype in (torch.float32, torch.float64)
        for kind in ("spread", "ties", "infinite")
        for q in (0.0, 1 - 0.2, 1.0)
        for route in ROUTES
    ]
    expected = [
        bits(plain(*draw(seed, n, dtype, kind), q))
        for seed, (n, dtype, kind, q, _) in enumerate(cases)
    ]
    for found in ranks.run(thresholds_on_ranks, cases):
        assert found == expected


def given_to_ranks(rank, size, entries, q):
    """`entries` maps a rank to its active values; each rank has two inactive NaN beside them."""
    mine = entries.get(rank, [])
    values, mask = torch.tensor([NAN, *mine, NAN]), torch.tensor([0, *len(mine) * [1], 0])
    return [bits(masked_quantile(values, mask, q, resolve(), route)) for route in ROUTES]


def one_for_all(found):
    """The result that all ranks and routes share."""
    results = {result for of_rank in found for result in of_rank}
    assert len(results) == 1, found
    return float.fromhex(results.pop()[1])


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_rank_without_an_active_value_takes_part(ranks):
    """A35: one rank returned before the collective and the others hung (huggingface/trl#3933)."""
    found = ranks.run(given_to_ranks, {0: [5.0, 1.0, 4.0, 2.0, 3.0]}, 0.75)
    assert one_for_all(found) == 4


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_threshold_is_not_taken_per_rank(ranks):
    """A41: each rank kept half of its own tokens (huggingface/trl#3833)."""
    own = {0: [0.1, 0.2], 1: [0.8, 0.9]}
    threshold = one_for_all(ranks.run(given_to_ranks, own, 0.5))
    assert [entropy >= threshold for entropy in own[0]] == [False, False]
    assert [entropy >= threshold for entropy in own[1]] == [True, True]


def test_degenerate_ranks(ranks):
    last = ranks.size - 1
    assert one_for_all(ranks.run(given_to_ranks, {}, 0.5)) == INF
    assert one_for_all(ranks.run(given_to_ranks, {last: [7.0]}, 0.5)) == 7
    nan = ranks.run(given_to_ranks, {0: [1.0, 2.0], last: [NAN]}, 0.0)
    assert math.isnan(one_for_all(nan))


class Collectives(TorchDispatchMode):
    """Records the collectives: (name, shape of what is sent)."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("_c10d_functional") and "wait" not in name:
            self.sent.append((name.split(".")[1], tuple(args[0].shape)))
        return function(*args, **(kwargs or {}))


def collectives_on_ranks(rank, size, lengths, route, seed):
    """What a call sends where rank r has about lengths[r] active values of more."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(lengths[rank] + rank, generator=generator)
    mask = torch.arange(len(values)) < lengths[rank]
    with Collectives() as record:
        masked_quantile(values, mask, 0.5, resolve(), route)
    return record.sent


@pytest.mark.parametrize("route", ROUTES)
def test_every_rank_sends_the_same(ranks, route):
    few = [300, 0, 7, 1][: ranks.size]
    many = [quantile.GATHER_TOKENS // ranks.size + 1, 0, 7, 1][: ranks.size]
    sent = {}
    for name, lengths in (("few", few), ("many", many)):
        of_ranks = ranks.run(collectives_on_ranks, lengths, route, 0)
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
        sent[name] = of_ranks[0]
    counts = ("all_gather_into_tensor", (1,))
    tables = [("all_reduce", (2048,)), ("all_reduce", (2048,)), ("all_reduce", (1024,))]
    histogram = [*tables, ("all_reduce", (2,))]
    gather_few = [counts, ("all_gather_into_tensor", (300,))]
    gather_many = [counts, ("all_gather_into_tensor", (many[0],))]
    assert (
        sent
        == {
            "gather": {"few": gather_few, "many": gather_many},
            "histogram": {"few": histogram, "many": histogram},
            None: {"few": gather_few, "many": [counts, *histogram]},
        }[route]
    )


def compiled_on_ranks(rank, size):
    compiled = torch.compile(masked_quantile, fullgraph=True, backend="aot_eager", dynamic=True)
    found = []
    for seed, n in enumerate((40, 900)):
        mine = share(*draw(seed, n, torch.float32, "ties"), rank, size, seed)
        found.append(bits(compiled(*mine, 0.7, resolve())))
    try:
        compiled(*mine, 0.7, resolve(), "gather")
    except Exception as error:
        # torch 2.8 says that something was raised, and not what.
        messages = "cannot be compiled", "Observed exception"
        found.append(any(message in str(error) for message in messages))
    return found


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiles_over_ranks(ranks):
    expected = [
        bits(plain(*draw(seed, n, torch.float32, "ties"), 0.7)) for seed, n in enumerate((40, 900))
    ]
    for found in ranks.run(compiled_on_ranks):
        assert found == [*expected, True]

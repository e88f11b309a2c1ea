"""Packed input gives what padded input gives, and segments are summed as they should be."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given as property_of
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES
from ratio_kl.objective.sequences import Packed, Padded, packed_mask, segment_spread, segment_sum
from support import (
    PER_TOKEN_OUTPUTS,
    Problem,
    Result,
    assert_close,
    assert_same,
    config_of,
    module,
    problem,
    run,
)

TOLERANCE = 1e-12  # float64; only the order of sums differs
B, T = 6, 16
LENGTHS = [16, 0, 1, 9, 16, 5]  # a full one, an empty one, one of one token, and an inactive one
TAIL = 3  # rows past the last sequence


class Packing:
    """Which places of a padded batch a packed one holds, in its order."""

    def __init__(self, lengths: list[int], tail: int = TAIL) -> None:
        self.inside = torch.arange(T) < torch.tensor(lengths)[:, None]
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        self.tail = tail

    def pack(self, value: Tensor, filling: float) -> Tensor:
        """[B, T, ...] -> [N, ...], `filling` past the last sequence."""
        rows = value[self.inside]
        return torch.cat([rows, rows.new_full((self.tail, *rows.shape[1:]), filling)])

    def padded(self, given: Problem) -> Problem:
        return given.with_inputs(attention_mask=given.active & self.inside)

    def packed(self, given: Problem, *, extra_dimension: bool = False) -> Problem:
        """The same batch without padding; junk past the last sequence, where nobody may look."""

        def shaped(value):
            if not isinstance(value, Tensor) or value.shape[:2] != (B, T):
                return value
            junk = torch.nan if value.is_floating_point() else -100
            packed = self.pack(value, 0 if value.dtype == torch.bool else junk)
            return packed[None] if extra_dimension else packed

        options = {name: shaped(value) for name, value in given.options.items()}
        inputs = tuple(shaped(value) for value in self.padded(given).inputs)
        return Problem(inputs, options | {"cu_seqlens": self.cu_seqlens})

    def of(self, result: Result) -> Result:
        """A padded result as the packed one should be."""
        neutral = {"ratio": 1, "phi": 1}
        outputs = {
            name: None if value is None else self.pack(value, neutral.get(name, 0))
            for name, value in result.outputs.items()
        }
        grads = result.grads | {"hidden": self.pack(result.grads["hidden"], 0)}
        return replace(result, outputs=outputs, grads=grads)


def assert_packed_is_padded(config, given: Problem, packing: Packing, **knobs) -> None:
    expected = run(module(config, **knobs), packing.padded(given))
    actual = run(module(config, **knobs), packing.packed(given))
    assert_same(actual, packing.of(expected), TOLERANCE, loss_size=1.0)


KINDS = [
    (loss_type, level)
    for loss_type, level in product(LOSS_TYPES, IMPORTANCE_SAMPLING_LEVELS)
    if loss_type != "vespo" or level == "token"
]


@pytest.mark.parametrize("shape", ["sequence", "column", "token"])
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_packed_is_padded(loss_type: str, level: str, shape: str) -> None:
    """Every loss type and level, every mask, every shape of a per-sequence argument."""
    config = config_of(
        loss_type,
        level,
        beta=0.1,
        use_bias_correction_kl=True,
        top_entropy_quantile=0.6,
        off_policy_mask_threshold=0.1,
        entropy_coef=0.05,
    )
    given = problem(
        1, config, bias=True, advantages=shape, sampling_ratio=shape, temperature=shape,
        sampling_logps=True,
    )  # fmt: skip
    assert_packed_is_padded(config, given, Packing(LENGTHS), chunk_bytes=1)


@pytest.mark.parametrize("reference", ["logps", "hidden", "hidden_only"])
@pytest.mark.parametrize("items", [None, 50, torch.tensor(50)])
def test_references_and_counts(reference: str, items) -> None:
    config = config_of("dapo", "sequence", beta=0.1)
    given = problem(2, config, reference=reference, bias=True)
    given = given.given(num_items_in_batch=items, gradient_accumulation_steps=3)
    assert_packed_is_padded(config, given, Packing(LENGTHS))


@pytest.mark.parametrize(
    "lengths",
    [[16] * 6, [0, 0, 0, 0, 0, 7], [7, 0, 0, 0, 0, 0], [1] * 6, [0] * 6, [0, 3, 0, 0, 5, 0]],
    ids=str,
)
@pytest.mark.parametrize("tail", [0, 4])
@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "sequence"), ("vespo", "token")])
def test_lengths(loss_type: str, level: str, tail: int, lengths: list[int]) -> None:
    if sum(lengths) + tail == B:
        tail += 1  # with as many tokens as sequences a 1-D argument is read as per token
    config = config_of(loss_type, level, beta=0.1, top_entropy_quantile=0.6)
    given = problem(3, config, sampling_ratio="sequence")
    assert_packed_is_padded(config, given, Packing(lengths, tail))


@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_rows_past_the_last_sequence_leave_no_nan_without_a_limit(loss_type, level) -> None:
    # Nothing clamps away what a division by the length of no sequence would leave there.
    config = config_of(loss_type, level, beta=0.1, log_ratio_limit=None)
    assert_packed_is_padded(config, problem(6, config), Packing(LENGTHS))


def test_one_sequence_only() -> None:
    config = config_of("grpo", "sequence", beta=0.1)
    given = problem(4, config, B=1)
    hidden, weight, ids, mask, A = given.inputs
    options = {name: value[0] for name, value in given.options.items()}
    packed = Problem((hidden[0], weight, ids[0], mask[0], A), options)
    expected = run(module(config), given)
    for dtype in (torch.int64, torch.int32):
        actual = run(module(config), packed.given(cu_seqlens=torch.tensor([0, 16], dtype=dtype)))
        assert_close(actual.loss, expected.loss, TOLERANCE, "loss")
        assert_close(actual.grads["hidden"], expected.grads["hidden"][0], TOLERANCE, "hidden")
        assert_close(actual.grads["weight"], expected.grads["weight"], TOLERANCE, "weight")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_leading_dimension_of_one_changes_shapes_only(loss_type: str) -> None:
    config = config_of(loss_type, beta=0.1, top_entropy_quantile=0.6, entropy_coef=0.1)
    given = problem(5, config, sampling_ratio="token", advantages="token", temperature="token")
    packing = Packing(LENGTHS)
    flat = run(module(config), packing.packed(given))
    shaped = run(module(config), packing.packed(given, extra_dimension=True))
    N = sum(LENGTHS) + TAIL
    assert shaped.grads["hidden"].shape == (1, N, 8)
    for name in PER_TOKEN_OUTPUTS:
        value = shaped.outputs[name]
        if value is not None:
            assert value.shape == (1, N)
            assert torch.equal(value[0], flat.outputs[name]), name
    assert torch.equal(shaped.loss, flat.loss)
    assert torch.equal(shaped.grads["hidden"][0], flat.grads["hidden"])


def test_hidden_may_have_the_leading_dimension_alone() -> None:
    config = config_of("grpo", beta=0.1)
    given = Packing(LENGTHS).packed(problem(5, config))
    shaped = given.with_inputs(hidden=given.hidden[None])
    result = run(module(config), shaped)
    assert torch.equal(result.loss, run(module(config), given).loss)
    assert result.outputs["logps"].shape == given.inputs[2].shape


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_sequence_at_all(tokens: int) -> None:
    """A batch of no sequence: loss 0, zero gradients, whatever the rows hold."""
    hidden = torch.full((tokens, 4), torch.nan).requires_grad_()
    weight = torch.randn(7, 4).requires_grad_()
    none = torch.zeros(tokens)
    for loss_type in LOSS_TYPES:
        out = module(config_of(loss_type, entropy_coef=0.1))(
            hidden, weight, none.long(), none, torch.zeros(0), cu_seqlens=torch.tensor([0])
        )
        assert torch.equal(out.loss, torch.zeros(()))
        for grad in torch.autograd.grad(out.loss, [hidden, weight]):
            assert not grad.any()


BAD = [
    ([1, 5, 10], "must start at 0; got another first entry$"),
    ([-1, 5, 10], "must start at 0"),
    ([0, 6, 5, 10], "must never decrease; got 1 below the one before$"),
    ([0, 2**63 - 1, -2, 10], "must never decrease; got 1 below"),
    ([0, 5, 11], "must end at N, the number of tokens, or before; got a last entry beyond$"),
    ([0, 5, 9], "must cover every active token: .* past its last entry; got 1 active token"),
    ([0], "must cover every active token.* got 10 active token"),
    ([3, 2, 11], "must start at 0; .*must never decrease; .*must end at N"),
]


def packed_call(cu_seqlens, *, hidden_shape=(10, 4), **changed):
    sequences = len(cu_seqlens) - 1 if isinstance(cu_seqlens, list) else 2
    offsets = torch.tensor(cu_seqlens) if isinstance(cu_seqlens, list) else cu_seqlens
    inputs = {
        "hidden": torch.randn(hidden_shape),
        "weight": torch.randn(7, 4),
        "action_ids": torch.zeros(10, dtype=torch.int64),
        "attention_mask": torch.ones(10),
        "advantages": torch.ones(sequences),
        "cu_seqlens": offsets,
    }
    return module(config_of("grpo"))(**(inputs | changed))


@pytest.mark.parametrize(("cu_seqlens", "expected"), BAD, ids=str)
def test_cu_seqlens_of_wrong_values(cu_seqlens: list[int], expected: str) -> None:
    with pytest.raises(ValueError, match=f"cu_seqlens {expected}"):
        packed_call(cu_seqlens)


def test_rows_past_the_last_sequence_may_be_inactive() -> None:
    mask = torch.tensor([1.0] * 8 + [0.0] * 2)
    assert packed_call([0, 3, 8], attention_mask=mask).metrics.active_tokens == 8
    with pytest.raises(ValueError, match="attention_mask must be 0 past its last entry"):
        packed_call([0, 3, 7], attention_mask=mask)


WRONG = [
    (torch.tensor([0.0, 5, 10]), {}, ValueError, "cu_seqlens must have an integer dtype"),
    (torch.tensor([[0, 5, 10]]), {}, ValueError, r"cu_seqlens must have shape \[S \+ 1\]; got"),
    (torch.tensor(10), {}, ValueError, r"cu_seqlens must have shape \[S \+ 1\]; got \[\]"),
    (torch.tensor([], dtype=torch.int64), {}, ValueError, r"cu_seqlens must have shape \[S \+ 1\]"),
    ((0, 5, 10), {}, TypeError, "cu_seqlens must be a tensor"),
    (torch.tensor([0, 5, 10], device="meta"), {}, ValueError, "cu_seqlens must be on hidden's"),
    ([0, 5, 10], {"hidden_shape": (2, 5, 4)}, ValueError, r"hidden must have shape \[N, H\] or"),
    ([0, 5, 10], {"hidden_shape": (1, 1, 10, 4)}, ValueError, r"hidden must have shape \[N, H\]"),
    ([0, 5, 10], {"advantages": torch.ones(3)}, ValueError, r"advantages must have .*\[2\].*got"),
    ([0, 5, 10], {"advantages": torch.ones(2, 10)}, ValueError, r"advantages .*got \[2, 10\]"),
    ([0, 5, 10], {"action_ids": torch.zeros(2, 5).long()}, ValueError, r"action_ids .*got \[2, 5"),
    ([0, 5, 10], {"old_logps": torch.zeros(9)}, ValueError, r"old_logps .*\[N\] = \[10\].*\[9\]"),
    (None, {}, ValueError, r"hidden must have shape \[B, T, H\], or \[N, H\] with cu_seqlens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cu_seqlens", "changed", "error", "match"), WRONG, ids=[str(i) for i in range(len(WRONG))]
)
def test_packed_arguments_of_wrong_form(cu_seqlens, changed, error, match: str) -> None:
    with pytest.raises(error, match=match):
        packed_call(cu_seqlens, **changed)


OFFSETS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@property_of(lengths=OFFSETS, tail=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_segments(lengths: list[int], tail: int, seed: int) -> None:
    """Sum and spread against loops, and each is the other's gradient."""
    generator = torch.Generator().manual_seed(seed)
    N = sum(lengths) + tail
    tokens = torch.randn(N, generator=generator, dtype=torch.float64).requires_grad_()
    sequences = torch.randn(len(lengths), generator=generator, dtype=torch.float64).requires_grad_()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    layout = Packed((N,), offsets)
    parts = tokens.split([*lengths, tail])[:-1]
    sums = layout.sum(tokens)
    torch.testing.assert_close(sums, torch.stack([p.sum() for p in parts]), rtol=1e-13, atol=1e-13)
    spread = layout.spread(sequences)
    counts = torch.tensor(lengths)
    expected = torch.cat([sequences.repeat_interleave(counts), torch.zeros(tail).double()])
    assert torch.equal(spread, expected)
    (d_tokens,) = torch.autograd.grad(sums, tokens, sequences.detach())
    assert torch.equal(d_tokens, spread.detach())
    (d_sequences,) = torch.autograd.grad(spread, sequences, tokens.detach())
    assert torch.equal(d_sequences, sums.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_segment_sums_are_deterministic_and_lose_no_digits(dtype: torch.dtype) -> None:
    # 100,000 equal values: a running float32 sum is off by 1e-3 of the sum, bfloat16 stops at 256;
    # a float64 one is off by 2e-12.
    tokens = torch.full((100_001,), 0.1, dtype=dtype)
    offsets = torch.tensor([0, 1, 100_001])
    sums = segment_sum(tokens, offsets)
    assert torch.equal(sums, segment_sum(tokens, offsets))
    assert sums.dtype == dtype
    expected = tokens[0].double() * 100_000
    assert abs(sums[1].double() - expected) <= expected * max(torch.finfo(dtype).eps, 1e-11)
    assert segment_spread(sums, offsets, 100_001).dtype == dtype


def test_padded_layout() -> None:
    layout = Padded((2, 3))
    tokens = torch.arange(6.0).view(2, 3)
    assert layout.num_sequences == 2
    assert torch.equal(layout.sum(tokens), torch.tensor([[3.0], [12.0]]))
    assert torch.equal(layout.spread(layout.sum(tokens))[:, 2], torch.tensor([3.0, 12.0]))
    assert torch.equal(layout.from_caller(torch.tensor([1, 2])), torch.tensor([[1], [2]]))


def test_the_packed_mask_is_a_copy() -> None:
    mask = torch.tensor([True, False, True])
    copy, faults = packed_mask(mask, torch.tensor([0, 3]), False, "later")
    assert torch.equal(copy, mask)
    assert not faults.any()
    assert copy.data_ptr() != mask.data_ptr()

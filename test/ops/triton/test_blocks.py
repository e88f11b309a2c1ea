"""Blocks of pass 2: they cover everything once and keep to the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratio_kl.ops.triton.blocks import Plan, Side, even_part, fitting_columns, plan

ROW_STEP, COLUMN_STEP = 128, 256


@given(
    n=st.integers(1, 40_000),
    vocab_size=st.integers(1, 160_000),
    H=st.integers(1, 8192),
    converted=st.sampled_from([0, 2]),
    budget=st.integers(1, 1 << 29),
)
def test_blocks_cover_all_once_within_the_budget(n, vocab_size, H, converted, budget):
    rows = Side(n, ROW_STEP, line_bytes=0, sum_bytes=4 * H)
    columns = Side(vocab_size, COLUMN_STEP, line_bytes=converted * H, sum_bytes=4 * H)
    blocks = plan(rows, columns, 2, budget, programs=132)
    assert blocks.rows_outermost == (n > vocab_size)

    row_parts = [range(r, min(r + blocks.rows, n)) for r in range(0, n, blocks.rows)]
    if len(row_parts) * -(-vocab_size // blocks.columns) <= 1000:
        walked = list(blocks.walk(n, vocab_size))
        assert len(set(map(str, walked))) == len(walked)
        area = sum((r.stop - r.start) * (c.stop - c.start) for r, c in walked)
        assert area == n * vocab_size

    height, width = min(blocks.rows, n), min(blocks.columns, vocab_size)
    outer, inner = (height, width) if blocks.rows_outermost else (width, height)
    cut_inner = inner < (vocab_size if blocks.rows_outermost else n)
    used = 2 * height * width + converted * H * width + 4 * H * outer * cut_inner
    one_tile = height <= ROW_STEP and width <= COLUMN_STEP
    assert used <= budget or one_tile


# 64 row tiles and 512 column tiles on 132 programs: parts of 64 would leave 31.03 rounds.
def test_parts_leave_few_programs_idle():
    rows, columns = Side(8192, 128, 0, 0), Side(131_072, 256, 0, 0)
    blocks = plan(rows, columns, 2, 1 << 28, programs=132)
    tiles = 64 * blocks.columns // 256
    assert -(-tiles // 132) * 132 / tiles < 1.015


@pytest.mark.parametrize(
    ("total", "most", "step", "part"),
    [(8192, 5461, 128, 4096), (8192, 2690, 128, 2048), (5, 1000, 128, 128), (300, 1, 128, 128)],
)
def test_even_part(total, most, step, part):
    assert even_part(total, most, step) == part


# As many rows as a block was made for, fewer, one; a vocabulary that fits and one that does not.
@pytest.mark.parametrize("rows", [4096, 4095, 409, 1])
@pytest.mark.parametrize("vocab_size", [128_256, 131, 1])
def test_fitting_columns_fill_the_memory_and_no_more(rows, vocab_size):
    aligned, space = 64, 4096 * 14_336
    columns = fitting_columns(space, rows, vocab_size, aligned)
    assert 0 < columns <= vocab_size
    assert rows * -(-columns // aligned) * aligned <= space
    assert columns == vocab_size or rows * (columns + aligned) > space


def test_a_first_block_of_its_own_width_is_followed_by_the_plans():
    made = Plan(rows=2, columns=3, rows_outermost=False, first=4)
    blocks = list(made.walk(4, 9))
    assert blocks[0] == (slice(0, 4), slice(0, 4))
    assert blocks[1:] == [
        (r, c) for c in (slice(4, 7), slice(7, 9)) for r in (slice(0, 2), slice(2, 4))
    ]
    assert made.widest == 4
    assert made._replace(first=0).widest == 3


# V = 9: the second of two blocks is as long as all columns, but begins at the fifth.
@pytest.mark.parametrize(
    ("first", "columns", "one"), [(0, 9, True), (0, 8, False), (9, 1, True), (4, 10, False)]
)
def test_one_column_part(first, columns, one):
    made = Plan(rows=2, columns=columns, rows_outermost=False, first=first)
    assert made.has_one_column_part(9) == one
    assert (len({c.start for _, c in made.walk(2, 9)}) == 1) == one

"""Tiles: what a budget buys, and that they cover everything once."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratio_kl.ops.contract import Head
from ratio_kl.ops.torch.tiling import LogitTiles, plan_tiles, select, tile_view

SIZES = st.integers(0, 3000)
BYTES = st.integers(0, 4096)


@settings(max_examples=300, deadline=None)
@given(
    rows=SIZES,
    columns=st.integers(1, 200_000),
    budget=st.integers(1, 2**30),
    element_bytes=st.integers(1, 32),
    row_bytes=BYTES,
    column_bytes=BYTES,
)
def test_a_plan_keeps_its_budget(
    rows: int,
    columns: int,
    budget: int,
    element_bytes: int,
    row_bytes: int,
    column_bytes: int,
) -> None:
    def cost(r: int, c: int) -> int:
        return r * c * element_bytes + r * row_bytes + c * column_bytes

    r, c = plan_tiles(
        rows,
        columns,
        budget=budget,
        element_bytes=element_bytes,
        row_bytes=row_bytes,
        column_bytes=column_bytes,
    )
    assert r >= 1
    assert c >= 1
    assert cost(r, c) <= max(budget, cost(64, 64))


@pytest.mark.parametrize("budget", [10**12, 2**62])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (1024, 100), (5000, 40_000)])
def test_enough_for_everything_is_one_tile(rows: int, columns: int, budget: int) -> None:
    assert plan_tiles(rows, columns, budget=budget, element_bytes=8) == (rows, columns)


def test_a_larger_budget_never_makes_more_tiles() -> None:
    for rows, columns in ((100, 50_000), (5000, 300), (1, 152_064)):
        counts = []
        for budget in (1, 2**14, 2**18, 2**22, 2**26, 2**30):
            r, c = plan_tiles(rows, columns, budget=budget, element_bytes=8)
            counts.append(-(-rows // r) * -(-columns // c))
        assert counts == sorted(counts, reverse=True)


def head_of(rows: int, columns: int, chunk_bytes: int, **options) -> Head:
    return Head(
        hidden=torch.randn(rows, 5, dtype=torch.float64),
        weight=torch.randn(columns + 2, 5, dtype=torch.float64),
        bias=torch.randn(columns + 2, dtype=torch.float64),
        inverse_temperature=options.get("inverse_temperature"),
        logit_scale=torch.tensor(0.75).double(),
        softcap=torch.tensor(1.5).double(),
        vocab_size=columns,
        compute_dtype=torch.float64,
        chunk_bytes=chunk_bytes,
    )


@pytest.mark.parametrize("columns_outermost", [False, True])
# Bytes for the smallest tiles, for strips, and for everything at once.
@pytest.mark.parametrize("chunk_bytes", [1, 150_000, 2**28])
@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (64, 64), (65, 63), (200, 131)])
def test_tiles_cover_every_logit_once(rows, columns, chunk_bytes, columns_outermost) -> None:
    tiles = LogitTiles(head_of(rows, columns, chunk_bytes), None, buffers=2)
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for block, cut in tiles.walk(columns_outermost=columns_outermost):
        seen[block, cut] += 1
        assert (cut.stop - cut.start) * (block.stop - block.start) > 0
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("per_row", "chunk_bytes"), list(product([False, True], [1, 150_000, 2**28]))
)
def test_logits_of_a_tile(per_row: bool, chunk_bytes: int) -> None:
    factor = torch.rand(200).double() + 0.5 if per_row else torch.tensor(0.8).double()
    head = head_of(200, 131, chunk_bytes, inverse_temperature=factor)
    rows = torch.arange(0, 200, 2)
    tiles = LogitTiles(head, rows, buffers=2)
    assert tiles.count == 100
    x = (head.hidden @ head.weight.T + head.bias)[:, :131] * 0.75
    z = 1.5 * torch.tanh(x / 1.5) * (factor[:, None] if per_row else factor)
    for block, cut in tiles.walk(columns_outermost=True):
        tile = tiles.logits(block, cut, tiles.weight(cut))
        torch.testing.assert_close(tile, z[rows][block, cut], rtol=1e-12, atol=1e-12)


def test_selecting_everything_copies_nothing() -> None:
    values = torch.randn(4, 2)
    assert select(values, None) is values
    assert torch.equal(select(values, torch.tensor([2])), values[2:3])


def test_a_tile_is_a_contiguous_matrix_in_its_buffer() -> None:
    buffer = torch.arange(12.0)
    view = tile_view(buffer, 2, 3)
    assert view.is_contiguous()
    assert view.data_ptr() == buffer.data_ptr()
    assert torch.equal(view, torch.tensor([[0.0, 1, 2], [3, 4, 5]]))

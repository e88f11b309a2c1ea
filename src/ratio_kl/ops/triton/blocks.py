"""How rows and vocabulary are cut into blocks that fit a budget. Integers only."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

WIDE = 2048
"""Lines of a block's outer side below which its inner side is cut instead: a narrow block pays
for reading and writing the inner side's fp32 sums more often than the products take."""

PART_COST = 0.01
"""See _busy_part. Estimated, not measured: half the time that 8 bytes an element of the sums take
at 4.3 TB/s, over that of a tile at 790 TFLOP/s, both of an H200."""


class Side(NamedTuple):
    """One side of the [rows, columns] rectangle that is to be cut."""

    lines: int
    step: int
    """A part is a multiple of it, or the whole side."""
    line_bytes: int
    """Temporaries that each line of a block needs, whatever the other side."""
    sum_bytes: int
    """Of a line's fp32 sum, which the outer side needs where the inner side is cut."""


class Plan(NamedTuple):
    """Blocks of `rows` x `columns`, walked with one side outermost."""

    rows: int
    columns: int
    rows_outermost: bool
    first: int = 0
    """Columns of a block of all rows that comes before these."""

    @property
    def widest(self) -> int:
        """Columns of the widest block."""
        return max(self.first, self.columns)

    def has_one_column_part(self, vocab_size: int) -> bool:
        """Whether each block has all columns: a part's length may be more than is left for it."""
        return (self.first or self.columns) >= vocab_size

    def walk(self, n: int, vocab_size: int) -> Iterator[tuple[slice, slice]]:
        """The blocks (rows, columns) of an [n, vocab_size] rectangle, in order."""
        row_parts = [slice(r, min(r + self.rows, n)) for r in range(0, n, self.rows)]
        column_parts = [
            slice(c, min(c + self.columns, vocab_size))
            for c in range(self.first, vocab_size, self.columns)
        ]
        if self.first:
            yield slice(0, n), slice(0, self.first)
        if self.rows_outermost:
            yield from ((r, c) for r in row_parts for c in column_parts)
        else:
            yield from ((r, c) for c in column_parts for r in row_parts)


@lru_cache(maxsize=1024)
def plan(
    rows: Side,
    columns: Side,
    item_bytes: int,
    budget: int,
    programs: int,
    *,
    columns_outermost: bool = False,
) -> Plan:
    """The largest blocks whose temporaries fit `budget` bytes; at least one step each way.

    item_bytes: of one element of a block. programs: how many tiles (step by step) are computed at
    a time. The longer side is outermost, so that the sums that span all blocks are those of the
    shorter side; or the columns, if the rows' sums are kept anyway.
    """
    rows_outermost = rows.lines > columns.lines and not columns_outermost
    if rows_outermost:
        most_rows, most_columns = _cut(rows, columns, item_bytes, budget, programs)
    else:
        most_columns, most_rows = _cut(columns, rows, item_bytes, budget, programs)
    return Plan(most_rows, most_columns, rows_outermost)


def _cut(outer: Side, inner: Side, item_bytes: int, budget: int, programs: int) -> tuple[int, int]:
    """Lines of a block (outer side, inner side)."""
    left = budget - inner.lines * inner.line_bytes
    lines = left // (inner.lines * item_bytes + outer.line_bytes)
    if lines >= min(outer.lines, WIDE):
        return _busy_part(outer, lines, -(-inner.lines // inner.step), programs), inner.lines
    lines = WIDE
    while True:
        left = budget - lines * (outer.line_bytes + outer.sum_bytes)
        most = left // (lines * item_bytes + inner.line_bytes)
        if most >= inner.step or lines <= outer.step:
            break
        lines //= 2
    return even_part(outer.lines, lines, outer.step), even_part(inner.lines, most, inner.step)


def _busy_part(side: Side, most: int, tiles_beside: int, programs: int) -> int:
    """Of a few even parts of at most `most` lines, the one that leaves the fewest programs idle.

    Counted in rounds of `programs` tiles. Each part also reads and writes the other side's sums,
    which takes about as long as PART_COST of a round for each of that side's tiles.
    """

    def cost(part: int) -> float:
        whole, rest = divmod(side.lines, part)
        rounds = [-(-(-(-lines // side.step) * tiles_beside) // programs) for lines in (part, rest)]
        return whole * rounds[0] + rounds[1] + -(-side.lines // part) * tiles_beside * PART_COST

    largest = even_part(side.lines, most, side.step)
    fewest = -(-side.lines // largest)
    parts = range(fewest, fewest + min(fewest, 8) + 1)
    sizes = {-(-side.lines // (count * side.step)) * side.step for count in parts}
    return min(sorted(sizes, reverse=True), key=cost)


def fitting_columns(space: int, rows: int, vocab_size: int, aligned: int) -> int:
    """Columns of a block of so many rows for which memory of `space` elements is enough.

    aligned: each row begins at a multiple of it.
    """
    return min(vocab_size, space // rows // aligned * aligned)


def even_part(total: int, most: int, step: int) -> int:
    """Length of even parts of `total`: a multiple of `step`, at most `most` or else one step."""
    parts = -(-total // (max(most // step, 1) * step))
    return -(-total // (parts * step)) * step

"""A vocabulary cut over ranks: which rows of the head lie where, and how scores are put together.

With rank r's own max m_r, log-sum s_r, log-probability l_r and entropy H_r of a token:

    m = max m_r;   w_r = exp(s_r + m_r - m);   log_sum = log(sum w_r)
    logp    = min(0, l_r + s_r + (m_r - m) - log_sum),    r the rank that holds the action
    entropy = log_sum - sum (w_r / sum w) (s_r - H_r + m_r - m)

One small gather, then the same operations in the same order on every rank, element by element: the
result is bitwise the same on all ranks and in any batch.
"""

from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Group, add_in_order, gather_over


class Cut(NamedTuple):
    """How the rows of a head lie over the ranks of a group."""

    rows: tuple[int, ...]
    """Of each rank, padding included."""
    rank: int
    """This one."""
    vocab_size: int
    """Real rows of all ranks."""

    @property
    def first_rows(self) -> list[int]:
        """Where each rank's rows begin."""
        return [sum(self.rows[:rank]) for rank in range(len(self.rows))]

    @property
    def first_row(self) -> int:
        """Where this rank's rows begin."""
        return sum(self.rows[: self.rank])

    @property
    def size(self) -> int:
        """Real rows of this rank, > 0."""
        return min(self.rows[self.rank], self.vocab_size - self.first_row)


def cut_of(rows: int, vocab_size: int, group: Group, device: torch.device) -> Cut:
    """How a head of `vocab_size` rows is cut, this rank holding `rows` of them.

    The ranks tell each other at the first call with this vocab_size, for one synchronisation, and
    remember.

    Raises:
        ValueError: at the first call on every rank, if the ranks' rows do not make up the
            vocabulary; later on a rank that comes with another number of rows.
    """
    process_group = _process_group(group.name)
    known = _cuts().setdefault(process_group, {})
    if vocab_size not in known:
        counts = gather_over(torch.tensor(rows, device=device), group).tolist()
        _check_rows(counts, vocab_size)
        known[vocab_size] = Cut(tuple(counts), process_group.rank(), vocab_size)
    cut = known[vocab_size]
    if cut.rows[cut.rank] != rows:
        raise ValueError(
            f"weight must have the rows of the first call with this tp_group and vocab_size = "
            f"{vocab_size}: {cut.rows[cut.rank]} on this rank; got {rows}"
        )
    return cut


def _process_group(name: str) -> "dist.ProcessGroup":
    from torch.distributed import distributed_c10d

    # What the functional collectives themselves ask; torch has no public name for it.
    found: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore
    return found


@lru_cache
def _cuts() -> "MutableMapping[dist.ProcessGroup, dict[int, Cut]]":
    """By the group itself: a later group may get the name of one that is gone."""
    return WeakKeyDictionary()


def _check_rows(counts: Sequence[int], vocab_size: int) -> None:
    padding = sum(counts) - vocab_size
    if 0 <= padding < counts[-1]:
        return
    reason = "only the last rank's rows may end in padding, and not all of them be padding"
    if padding < 0:
        reason = "rows are missing"
    elif all(count >= vocab_size for count in counts):
        reason = "every rank holds the whole head: pass each rank its own rows, or no tp_group"
    raise ValueError(
        f"weight must be this rank's rows of the head, those of all ranks of tp_group together "
        f"vocab_size = {vocab_size}; got {list(counts)} rows: {reason}"
    )


class Merged(NamedTuple):
    """Scores under the whole vocabulary, [N] each; entropies None if the parts have none."""

    logps: Tensor
    max: Tensor
    log_sum: Tensor
    entropies: Tensor | None


def merge(parts: Tensor, first_rows: Sequence[int], ids: Tensor) -> Merged:
    """The scores of all ranks put together.

    Args:
        parts: [ranks, 3 or 4, N], of each rank logps, max, log_sum and, if asked for, entropies.
        first_rows: where each rank's rows begin.
        ids: [N] int64, in the whole vocabulary. Elsewhere any number may come out.
    """
    logps, peaks, log_sums, *entropies = parts.unbind(1)
    peak = peaks.amax(0)
    gaps = peaks - peak
    log_masses = log_sums + gaps
    masses = log_masses.exp()
    total = add_in_order(masses)
    log_sum = total.log()
    # Rows that are all -inf have no scores of their own, beside others that are not.
    nothing = (peaks == -torch.inf) & (peak != -torch.inf)
    targets = torch.where(nothing, -torch.inf, logps + log_masses)
    target = targets[0]
    for first, later in zip(first_rows[1:], targets[1:], strict=True):
        target = torch.where(ids >= first, later, target)
    merged = Merged(torch.clamp(target - log_sum, max=0), peak, log_sum, None)
    if not entropies:
        return merged
    moments = torch.where(masses == 0, 0, masses * (log_sums - entropies[0] + gaps))
    entropy = torch.clamp(log_sum - add_in_order(moments) / total, min=0)
    return merged._replace(entropies=entropy)

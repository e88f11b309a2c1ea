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
    def sizes(self) -> list[int]:
        """Real rows of each rank, > 0."""
        starts = zip(self.rows, self.first_rows, strict=True)
        return [min(rows, self.vocab_size - first) for rows, first in starts]

    @property
    def first_row(self) -> int:
        """Where this rank's rows begin."""
        return self.first_rows[self.rank]

    @property
    def size(self) -> int:
        """Real rows of this rank."""
        return self.sizes[self.rank]


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


class Parts(NamedTuple):
    """Scores of N tokens: of one rank, of all ranks (then with a first axis more), or merged."""

    logps: Tensor
    max: Tensor
    log_sum: Tensor
    """[N]."""
    entropies: Tensor
    """[N] or [0]."""
    statistics: Tensor
    """[3, N] or [3, 0]: log sum p^2, mean of z, 1 where the id is the first of the largest z."""


def gather_parts(own: Parts, flag: bool, group: Group) -> tuple[Parts, Tensor]:
    """The parts of all ranks, and whether any rank's flag is set (0-d bool): one collective."""
    flat = [own.logps.new_full((1,), float(flag)), *(part.reshape(-1) for part in own)]
    gathered = gather_over(torch.cat(flat), group).split([part.numel() for part in flat], dim=1)
    flags, *parts = gathered
    shapes = ((group.size, *part.shape) for part in own)
    of_ranks = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return Parts(*of_ranks), flags.amax() > 0


def merge(parts: Parts, cut: Cut, ids: Tensor) -> Parts:
    """The scores under the whole vocabulary.

    Args:
        parts: of all ranks.
        ids: [N] int64, in the whole vocabulary; where one is not, logps and top1 are any number.
    """
    peak = parts.max.amax(0)
    gaps = parts.max - peak
    log_masses = parts.log_sum + gaps
    masses = log_masses.exp()
    total = add_in_order(masses)
    log_sum = total.log()
    # Rows that are all -inf have no scores of their own, beside others that are not.
    nothing = (parts.max == -torch.inf) & (peak != -torch.inf)
    targets = torch.where(nothing, -torch.inf, parts.logps + log_masses)
    logps = torch.clamp(_of_owner(targets, cut, ids) - log_sum, max=0)
    entropies, statistics = parts.entropies[0], parts.statistics[0]
    if entropies.numel() > 0:
        means = parts.log_sum - parts.entropies + gaps
        moments = torch.where(masses == 0, 0, masses * means)
        entropies = torch.clamp(log_sum - add_in_order(moments) / total, min=0)
    if statistics.numel() > 0:
        statistics = _merge_statistics(parts, log_masses - log_sum, cut, ids)
    return Parts(logps, peak, log_sum, entropies, statistics)


def _merge_statistics(parts: Parts, log_shares: Tensor, cut: Cut, ids: Tensor) -> Tensor:
    """[3, N]; log_shares [ranks, N] is the logarithm of each rank's share of the probability."""
    log_squares, means, top1 = parts.statistics.unbind(1)
    squares = torch.where(log_shares == -torch.inf, 0, (log_squares + 2 * log_shares).exp())
    mean = add_in_order(
        torch.stack(
            [size / cut.vocab_size * each for size, each in zip(cut.sizes, means, strict=True)]
        )
    )
    largest = parts.max == parts.max.amax(0)
    leads = largest & (largest.cumsum(0) == 1)
    first = _of_owner(torch.where(leads, top1, 0), cut, ids)
    return torch.stack([add_in_order(squares).log(), mean, first])


def _of_owner(of_ranks: Tensor, cut: Cut, ids: Tensor) -> Tensor:
    """The entry of the rank that holds each id."""
    chosen = of_ranks[0]
    for first, later in zip(cut.first_rows[1:], of_ranks[1:], strict=True):
        chosen = torch.where(ids >= first, later, chosen)
    return chosen

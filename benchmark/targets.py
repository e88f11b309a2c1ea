"""What must hold on one H200, as a table; printed as passed or failed beneath a GPU run.

Times are in mm, that is in torch.mm(hidden, weight.T) of the same rounds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .results import MIB, Row
from .rivals import CONTENDERS, OURS

WIDE = 4096
"""Hidden size from which a product is bound by arithmetic, so that the limits are tighter."""
LOSS_BYTES, FORWARD_BYTES = 256 * MIB, 32 * MIB
"""Of temporaries: twice the library's default chunk_bytes, and what pass 1 alone may take."""


@dataclass(frozen=True)
class Verdict:
    """One line of the closing list."""

    target: str
    where: str
    measured: str
    limit: str
    passed: bool


@dataclass(frozen=True)
class Limit:
    """A figure of ours that must not pass a limit in a case."""

    title: str
    case: str
    figure: str
    """An attribute of Row."""
    limit: Callable[[Row], float]
    unit: str = "{:.3g}"
    where: Callable[[Row], bool] = lambda row: True


def at_most(wide: float, narrow: float | None = None) -> Callable[[Row], float]:
    """One limit, or one for H >= WIDE and one below."""
    return lambda row: wide if narrow is None or row.size.width >= WIDE else narrow


def loss_bytes(row: Row) -> float:
    """Temporaries, the float32 sum of d_hidden, and the compacted copy of the active rows."""
    states = row.size.tokens * row.size.width
    copy = 0 if row.active == 1 else 2 * row.active * states
    return LOSS_BYTES + 4 * states + copy


def forward_bytes(row: Row) -> float:
    copy = 0 if row.active == 1 else 2 * row.active * row.size.tokens * row.size.width
    return FORWARD_BYTES + copy


def _is_main(row: Row) -> bool:
    return row.size.width >= 2048


LOSSES = ("dense", "inactive", "zero", "inactive_zero", "quantile", "frozen")
LIMITS = (
    Limit("forward, mm", "forward", "mm", at_most(1.09, 1.16)),
    Limit("forward with entropy, mm", "forward_entropy", "mm", at_most(1.09, 1.16)),
    Limit("forward + backward, mm", "dense", "mm", at_most(4.3, 4.45)),
    Limit("half inactive, mm", "inactive", "mm", at_most(2.25)),
    Limit("half zero advantage, mm", "zero", "mm", at_most(2.7)),
    Limit("half inactive, half of the rest zero, mm", "inactive_zero", "mm", at_most(1.45)),
    Limit("half inactive, q = 0.2, mm", "quantile", "mm", at_most(0.95)),
    Limit("frozen head, mm", "frozen", "mm", at_most(3.4)),
    Limit("few tokens, mm of device time", "small", "mm", at_most(1.5), where=_is_main),
    *(
        Limit(f"host's time of {name}, us", case, "host_us", at_most(150))
        for name, case in (("pass 1", "pass_one"), ("pass 2", "pass_two"))
    ),
    *(
        Limit(
            f"{case}: MiB beyond gradients",
            case,
            "extra_mib",
            lambda row: loss_bytes(row) / MIB,
            "{:.0f}",
        )
        for case in LOSSES
    ),
    *(
        Limit(f"{case}: MiB", case, "extra_mib", lambda row: forward_bytes(row) / MIB, "{:.0f}")
        for case in ("forward", "forward_entropy")
    ),
    Limit("logp error", "dense", "logp_error", at_most(5e-5), "{:.1e}"),
    Limit("error of d_hidden", "dense", "hidden_error", at_most(4e-3), "{:.1e}"),
    Limit("error of d_weight", "dense", "weight_error", at_most(4e-3), "{:.1e}"),
)

AHEAD_OF = {
    "trl": ("ms", "extra_bytes", "logp_error"),
    "liger_ce": ("ms", "logp_error"),
    "liger_grpo": ("ms", "extra_bytes"),
    "verl": ("ms", "extra_bytes", "logp_error"),
}
"""Rivals that compute the same exactly, and the figures in which ours is to be the smaller one."""
FIGURES = {"ms": "time", "extra_bytes": "memory", "logp_error": "logp error"}

LOGITS_SPEEDUP, LOGITS_MEMORY = 10.0, 3.0
QUANTILE_SPEEDUP = 3.0


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Every target that these rows can speak to."""
    rows = [row for row in rows if row.data == "random"]
    return [*_limits(rows), *_ahead(rows), *_ratios(rows)]


def _limits(rows: list[Row]) -> list[Verdict]:
    found = []
    for limit in LIMITS:
        for row in rows:
            if row.case != limit.case or row.contender != OURS or not limit.where(row):
                continue
            value, most = getattr(row, limit.figure), limit.limit(row)
            shown = row.status if value is None else limit.unit.format(value)
            passed = value is not None and value <= most
            found.append(
                Verdict(limit.title, row.shape, shown, "<= " + limit.unit.format(most), passed)
            )
    return found


def _ahead(rows: list[Row]) -> list[Verdict]:
    by_name = {(row.shape, row.contender): row for row in rows if row.case == "dense"}
    found = []
    for (shape, name), rival in by_name.items():
        ours = by_name[shape, OURS]
        for figure in AHEAD_OF.get(name, ()) if rival.ok and ours.ok else ():
            mine, theirs = getattr(ours, figure), getattr(rival, figure)
            if theirs is not None:
                title = f"{FIGURES[figure]} below {CONTENDERS[name].title}"
                share = f"{mine / theirs:.2f} of it"
                found.append(Verdict(title, shape, share, "< 1", mine < theirs))
    return found


def _ratios(rows: list[Row]) -> list[Verdict]:
    """How many times less than a rival: (case, rival, figure, at least)."""
    wanted = (
        ("logits", "eager", "ms", LOGITS_SPEEDUP),
        ("logits", "eager", "peak_bytes", LOGITS_MEMORY),
        ("quantile", "compiled", "ms", QUANTILE_SPEEDUP),
        ("small", "trl", "host_us", 1.0),
    )
    found = []
    by_name = {(row.case, row.shape, row.contender): row for row in rows if row.ok}
    for case, rival, figure, least in wanted:
        for (name, shape, contender), row in by_name.items():
            other = by_name.get((case, shape, rival))
            if name != case or contender != OURS or other is None:
                continue
            mine, theirs = getattr(row, figure), getattr(other, figure)
            if mine is None or theirs is None:
                continue
            times = theirs / max(mine, 1)
            title = f"{case}: {rival}'s {figure.partition('_')[0]} over ours"
            found.append(Verdict(title, shape, f"{times:.1f}", f">= {least:.0f}", times >= least))
    return found

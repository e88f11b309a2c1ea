"""Pictures of a run: bars beside the rivals, and how time and memory grow."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from .results import Row, Run
from .rivals import CONTENDERS, OURS

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

# Okabe and Ito's palette, distinct to colour-blind eyes; ours alone is warm.
STYLES = {
    OURS: ("#D55E00", "o"),
    "eager": ("#555555", "s"),
    "compiled": ("#999999", "D"),
    "trl": ("#0072B2", "^"),
    "liger_ce": ("#009E73", "v"),
    "liger_grpo": ("#66BFA3", "<"),
    "verl": ("#CC79A7", "P"),
    "cce": ("#56B4E9", "X"),
    "quack": ("#B8A000", "*"),
}
SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 160,
    "savefig.bbox": "tight",
}


def draw(run: Run, out: Path) -> list[Path]:
    """Write every picture that the run has rows for; their paths."""
    written = []
    with plt.rc_context(SETTINGS):
        for name, make in PICTURES.items():
            figure = make(run)
            if figure is not None:
                written.append(out / f"{name}.png")
                figure.savefig(written[-1])
                plt.close(figure)
    return written


def bars(run: Run) -> Figure | None:
    """Time and memory of forward + backward beside every rival, a line of panels a shape."""
    rows = [row for row in run.rows if row.case == "dense" and row.ok]
    shapes = list(dict.fromkeys(row.shape for row in rows))
    if not shapes:
        return None
    most = max(sum(row.shape == shape for row in rows) for shape in shapes)
    figure, axes = plt.subplots(
        len(shapes),
        2,
        figsize=(12, (0.34 * most + 0.9) * len(shapes) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for line, shape in zip(axes, shapes, strict=True):
        group = [row for row in rows if row.shape == shape]
        ours = next((row for row in group if row.contender == OURS), group[0])
        size = ours.size
        where = f"N = {size.tokens:,}, H = {size.width:,}, V = {size.vocabulary:,}"
        _bar_panel(line[0], group, "ms", "time (ms)", _time_and_unit)
        _bar_panel(line[1], group, "extra_mib", "memory beyond inputs and gradients (MiB)", None)
        line[0].set_title(where)
        line[1].set_yticklabels([])
    _caption(
        figure, run, f"Forward + backward of the policy loss, every token active, {rows[0].dtype}"
    )
    return figure


def _time_and_unit(row: Row) -> str:
    assert row.ms is not None
    ms = f"{row.ms:,.0f}" if row.ms >= 100 else f"{row.ms:.3g}"
    return f"{ms}  ({row.mm:.2f} mm)"


def _bar_panel(
    axis: Axes,
    group: Sequence[Row],
    attribute: str,
    label: str,
    text: Callable[[Row], str] | None,
) -> None:
    """Horizontal bars of an attribute of the rows, in their order, a number at the end of each."""
    values = [getattr(row, attribute) or 0.0 for row in group]
    largest = max(values) or 1.0
    for place, (row, value) in enumerate(zip(group, values, strict=True)):
        ours, exact = row.contender == OURS, CONTENDERS[row.contender].exact
        colour = STYLES[OURS][0] if ours else "#A9B4BE"
        face = colour if exact else "white"
        axis.barh(
            place, value, color=face, edgecolor=colour, hatch=None if exact else "////", height=0.72
        )
        shown = text(row) if text else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        axis.text(
            value + 0.012 * largest,
            place,
            shown,
            va="center",
            fontsize=9.5,
            fontweight="bold" if ours else "normal",
        )
    axis.set_yticks(range(len(group)), [CONTENDERS[row.contender].title for row in group])
    for tick, row in zip(axis.get_yticklabels(), group, strict=True):
        tick.set_fontweight("bold" if row.contender == OURS else "normal")
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * largest)
    axis.set_xlabel(label)
    axis.tick_params(axis="y", length=0)


def growth(run: Run) -> Figure | None:
    """Time and memory against N, memory against V, on logarithmic axes."""
    panels = (
        ("tokens", "ms", "time (ms)", "Time against tokens"),
        ("tokens", "extra_mib", "memory beyond gradients (MiB)", "Memory against tokens"),
        ("vocabulary", "extra_mib", "memory beyond gradients (MiB)", "Memory against vocabulary"),
    )
    if not any(row.case == case for row in run.rows for case, *_ in panels):
        return None
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    for axis, (case, attribute, label, title) in zip(axes, panels, strict=True):
        rows = [row for row in run.rows if row.case == case]
        names = list(dict.fromkeys(row.contender for row in rows))
        for name in sorted(names, key=lambda name: name == OURS):
            _curve(axis, [row for row in rows if row.contender == name], case, attribute)
        if rows:
            fixed = rows[0].size
            other = {
                "tokens": f"H = {fixed.width:,}, V = {fixed.vocabulary:,}",
                "vocabulary": f"N = {fixed.tokens:,}, H = {fixed.width:,}",
            }
            axis.set_title(f"{title}\n{other[case]}")
            ticks = sorted({getattr(row.size, case) for row in rows})
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30, ha="right")
        axis.set_xlabel({"tokens": "tokens N", "vocabulary": "vocabulary V"}[case])
        axis.set_ylabel(label)
        axis.grid(alpha=0.25, which="major")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    _caption(figure, run, "Growth of forward + backward")
    return figure


def _curve(axis: Axes, rows: Sequence[Row], case: str, attribute: str) -> None:
    points = [(getattr(row.size, case), getattr(row, attribute)) for row in rows if row.ok]
    points = sorted((x, max(y, 1e-3)) for x, y in points if y is not None)
    if not points:
        return
    name = rows[0].contender
    colour, marker = STYLES[name]
    ours = name == OURS
    axis.loglog(
        *zip(*points, strict=True),
        color=colour,
        marker=marker,
        markersize=7 if ours else 5,
        linewidth=3 if ours else 1.5,
        label=CONTENDERS[name].title,
        base=2,
        zorder=3 if ours else 2,
    )
    axis.set_yscale("log", base=10)
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axis.minorticks_off()


def skipped(run: Run) -> Figure | None:
    """What leaving out tokens buys: time of each case in mm, ours beside its rivals."""
    names = ("dense", "zero", "inactive", "inactive_zero", "quantile", "frozen", "forward")
    labels = {
        "dense": "every token\nactive",
        "zero": "half zero\nadvantage",
        "inactive": "half\ninactive",
        "inactive_zero": "half inactive,\nhalf of the rest\nzero advantage",
        "quantile": "half inactive,\n20 % of highest\nentropy",
        "frozen": "frozen\nhead",
        "forward": "forward\nonly",
    }
    rows = [row for row in run.rows if row.case in names and row.ok]
    cases = [name for name in names if any(row.case == name for row in rows)]
    if len(cases) < 2:
        return None
    shape = next(row.shape for row in rows)
    chosen = [row for row in rows if row.shape == shape]
    wanted = [
        n
        for n in (OURS, "trl", "liger_ce", "compiled", "eager")
        if sum(row.contender == n for row in chosen) > len(cases) // 2
    ]
    figure, axis = plt.subplots(figsize=(12, 4.6), layout="constrained")
    width = 0.8 / len(wanted)
    for index, name in enumerate(wanted):
        found = {row.case: row.mm for row in chosen if row.contender == name}
        places = [i for i, case in enumerate(cases) if case in found]
        values = [found[cases[i]] or 0.0 for i in places]
        at = [i + (index - (len(wanted) - 1) / 2) * width for i in places]
        axis.bar(
            at,
            values,
            0.92 * width,
            color=STYLES[name][0],
            label=CONTENDERS[name].title,
            alpha=1.0 if name == OURS else 0.75,
        )
        for x, value in zip(at, values, strict=True):
            axis.text(
                x,
                value,
                f"{value:.2f}",
                ha="center",
                va="bottom",
                fontsize=8.5,
                fontweight="bold" if name == OURS else "normal",
            )
    axis.set_xticks(range(len(cases)), [labels[case] for case in cases])
    axis.set_ylabel("time (in matrix products hidden @ weight.T)")
    axis.tick_params(axis="x", length=0)
    # Room above the bars, so that it hides none.
    axis.set_ylim(top=1.12 * axis.get_ylim()[1])
    axis.legend(loc="upper right", ncols=len(wanted), frameon=False)
    _caption(figure, run, f"Work that is not needed is not done: N x H x V = {shape}")
    return figure


def _caption(figure: Figure, run: Run, title: str) -> None:
    about = run.environment
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.text(
        0.01,
        -0.01,
        f"{about['hardware']}; {about['software']}; {about['date']}\n{about['command']}",
        ha="left",
        va="top",
        fontsize=8,
        color="#555555",
        wrap=True,
    )


PICTURES: dict[str, Callable[[Run], Figure | None]] = {
    "rivals": bars,
    "growth": growth,
    "cases": skipped,
}

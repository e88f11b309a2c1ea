"""Tables of a run: in the terminal, as Markdown, and as plots.

python -m benchmark.report RESULTS.json ... --out DIR       again, from what runs have saved
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import plots
from .cases import CASES, ROLLOUTS
from .results import MIB, Row, Run, merged
from .rivals import CONTENDERS, OURS
from .targets import Verdict, verdicts

HEADER = (
    "N x H x V",
    "",
    "ms",
    "mm",
    "extra MiB",
    "with gradients",
    "logp error",
    "d_hidden error",
    "d_weight error",
    "host us",
)
LEGEND = (
    "ms: median of interleaved rounds. mm: ms over that of one of 4 torch.mm(hidden, weight.T) in "
    "a row, in the same dtype and rounds. extra MiB: peak beyond inputs and gradients ({memory}). "
    "Errors against float64 on every token: of logp the largest absolute one, of gradients the "
    "relative Frobenius norm."
)


def titles() -> dict[str, str]:
    return {name: case.title for name, case in (CASES | ROLLOUTS).items()}


def cells(row: Row) -> tuple[str, ...]:
    """A row of a table."""
    contender = CONTENDERS[row.contender]
    name = contender.title if row.data == "random" else f"{contender.title}, on {row.data}"
    if not row.ok:
        return (row.shape, f"{name}: {row.status}", *[""] * 8)
    name += f" ({contender.note})" if contender.note else ""
    return (
        row.shape,
        name,
        _number(row.ms, "{:.4g}"),
        _number(row.mm, "{:.3g}"),
        _mebibytes(row.extra_bytes),
        _mebibytes(row.peak_bytes),
        _number(row.logp_error, "{:.1e}"),
        _number(row.hidden_error, "{:.1e}"),
        _number(row.weight_error, "{:.1e}"),
        _number(row.host_us, "{:.0f}"),
    )


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """The header and a line a row, without the columns in which no row says anything."""
    lines = [cells(row) for row in rows]
    used = [i for i in range(len(HEADER)) if i < 3 or any(line[i] for line in lines)]
    return [[line[i] for i in used] for line in (HEADER, *lines)]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:,.0f}" if value >= MIB else f"{value / MIB:.2g}"


def tables(run: Run) -> dict[str, list[Row]]:
    """Rows by case, in the order of the cases."""
    names = [name for name in titles() if any(row.case == name for row in run.rows)]
    return {name: [row for row in run.rows if row.case == name] for name in names}


def print_run(console: Console, run: Run) -> None:
    """The environment, a table a case, and the targets on a GPU."""
    for name, rows in tables(run).items():
        header, *lines = grid(rows)
        table = Table(title=f"{name}: {titles()[name]}, {rows[0].dtype}", title_justify="left")
        for i, title in enumerate(header):
            table.add_column(title, justify="left" if i < 2 else "right", overflow="fold")
        before = None
        for row, line in zip(rows, lines, strict=True):
            if before not in (None, row.shape):
                table.add_section()
            line[0] = "" if before == row.shape else line[0]
            table.add_row(*line, style="bold" if row.contender == OURS else None)
            before = row.shape
        console.print(table)
    console.print(LEGEND.format(**run.environment), style="dim")
    for name, value in run.environment.items():
        console.print(f"{name}: {value}", style="dim", markup=False, highlight=False)


def print_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    """Targets, one line each, passed or failed."""
    table = Table("", "target", "where", "measured", "limit", title="Targets on one H200")
    for verdict in found:
        mark = "[green]pass[/]" if verdict.passed else "[bold red]FAIL[/]"
        table.add_row(mark, verdict.target, verdict.where, verdict.measured, verdict.limit)
    console.print(table)
    console.print(f"{sum(v.passed for v in found)} of {len(found)} targets hold")


def markdown(run: Run, found: Sequence[Verdict]) -> str:
    """All of it as a Markdown page."""
    lines = ["# Benchmark", ""]
    lines += [f"- {name}: {_code(name, value)}" for name, value in run.environment.items()]
    lines += ["", LEGEND.format(**run.environment), ""]
    for name, rows in tables(run).items():
        lines += [f"## {titles()[name]}", "", f"`--case {name}`, {rows[0].dtype}", ""]
        header, *body = grid(rows)
        lines += [_line(header), _line("---" for _ in header)]
        for line, row in zip(body, rows, strict=True):
            mark = "**" if row.contender == OURS else ""
            lines.append(_line(f"{mark}{cell}{mark}" if cell else "" for cell in line))
        lines.append("")
    if found:
        lines += ["## Targets on one H200", "", _line(("", "target", "where", "measured", "limit"))]
        lines.append(_line(("---",) * 5))
        lines += [
            _line(("pass" if v.passed else "**FAIL**", v.target, v.where, v.measured, v.limit))
            for v in found
        ]
        lines.append("")
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _code(name: str, value: str) -> str:
    return f"`{value}`" if name == "command" else value


def write(run: Run, out: Path, console: Console) -> None:
    """Print the run, and write results.json, results.md and the plots into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    on_gpu = run.environment["memory"].endswith("CUDA allocator")
    found = verdicts(run.rows) if on_gpu else []
    print_run(console, run)
    if found:
        print_verdicts(console, found)
    run.save(out / "results.json")
    (out / "results.md").write_text(markdown(run, found), "utf-8")
    written = [out / "results.json", out / "results.md", *plots.draw(run, out)]
    console.print("written: " + ", ".join(str(path) for path in written), highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="results.json of one machine's runs")
    parser.add_argument("--out", type=Path, default=Path("out/benchmark"))
    arguments = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 160)
    write(merged(Run.load(path) for path in arguments.results), arguments.out, console)


if __name__ == "__main__":
    main()

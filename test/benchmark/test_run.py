"""The whole benchmark on a toy size: rows, reasons, red light, verdicts, files."""

import json

import pytest
import torch

pytest.importorskip("rich")
from rich.console import Console

from benchmark import run as bench
from benchmark.__main__ import parser
from benchmark.results import Row, Run, merged
from benchmark.shapes import Shape
from benchmark.targets import verdicts

CPU = torch.device("cpu")
TOY = Shape(16, 8, 50)
ENVIRONMENT = {
    "date": "2026-01-01",
    "hardware": "none",
    "software": "none",
    "packages": "none",
    "memory": "torch's CUDA allocator",
    "command": "python -m benchmark",
}


def plan(tmp_path, **changes):
    fields = {
        "cases": ["dense"],
        "against": ["eager"],
        "shapes": [TOY],
        "dtype": torch.float32,
        "device": CPU,
        "out": tmp_path,
        "inputs": None,
        "seconds": 0.0,
        "budget": 1e9,
    }
    return bench.Plan(**(fields | changes))


def run(plan):
    result = Run(dict(ENVIRONMENT))
    return bench.run(plan, result, Console(quiet=True)), result


def row(contender="ours", case="dense", **figures):
    return Row(case, "random", "8192x4096x131072", "bfloat16", contender, **figures)


@pytest.mark.parametrize("case", ["dense", "quantile", "forward_entropy", "logits", "small"])
def test_a_row_says_time_memory_and_error(case, tmp_path):
    right, result = run(plan(tmp_path, cases=[case]))
    assert right
    assert [row.contender for row in result.rows] == ["ours", "eager"]
    for found in result.rows:
        assert found.ok, found.status
        assert found.ms > 0
        assert found.mm > 0
        assert found.peak_bytes > 0
        # float32 against float64 on 50 columns: some roundings of 6e-8 each.
        assert found.logp_error < 1e-5
    if case in ("dense", "quantile"):
        gradients = 4 * (16 * 8 + 50 * 8)
        assert {found.gradient_bytes for found in result.rows} == {gradients}
        assert all(found.hidden_error < 1e-5 for found in result.rows)
        assert all(found.weight_error < 1e-5 for found in result.rows)


def test_rivals_that_cannot_run_say_why(tmp_path, monkeypatch):
    def load(name, job, known=bench.load):
        if name == "trl":
            raise ModuleNotFoundError("No module named 'trl'", name="trl")
        if name == "liger_ce":
            return lambda problem: 1 / 0
        return known(name, job)

    monkeypatch.setattr(bench, "load", load)
    _, result = run(plan(tmp_path, cases=["quantile"], against=["trl", "liger_ce", "eager"]))
    status = {found.contender: found.status for found in result.rows}
    assert status["trl"] == "trl is not installed"
    assert status["liger_ce"] == "fails: ZeroDivisionError: division by zero"
    assert status["ours"] == status["eager"] == "ok"


def test_nothing_is_reported_on_red(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "failures", lambda *_: ["error of logps 1e-1, allowed 2e-5"])
    right, result = run(plan(tmp_path))
    assert not right
    assert all(found.ms is None for found in result.rows)
    assert {found.status for found in result.rows} == {"not reported: the correctness test is red"}


def test_past_the_budget_nothing_new_is_begun(tmp_path):
    right, result = run(plan(tmp_path, budget=-1))
    assert right
    assert {found.status for found in result.rows} == {"not run: -1 s are over"}


def test_results_are_saved_and_merged(tmp_path):
    _, result = run(plan(tmp_path))
    saved = Run.load(tmp_path / "results.json")
    assert saved == result
    later = Run({**ENVIRONMENT, "command": "another"}, [row(ms=2.0)])
    earlier = Run(dict(ENVIRONMENT), [row(ms=1.0), row("trl", ms=3.0)])
    both = merged([earlier, later])
    assert [(found.contender, found.ms) for found in both.rows] == [("ours", 2.0), ("trl", 3.0)]
    assert both.environment["command"] == "python -m benchmark; another"


def test_verdicts_by_hand():
    MIB = 2**20
    # At 8192 x 4096: 256 MiB and 4 N H = 128 MiB.
    ours = row(ms=50.0, mm=4.31, peak_bytes=384 * MIB, gradient_bytes=0, logp_error=5e-5)
    trl = row("trl", ms=57.0, peak_bytes=1000 * MIB, gradient_bytes=0, logp_error=6e-3)
    found = {verdict.target: verdict for verdict in verdicts([ours, trl])}
    assert not found["forward + backward, mm"].passed
    assert found["dense: MiB beyond gradients"].passed
    assert found["dense: MiB beyond gradients"].limit == "<= 384"
    assert found["logp error"].passed
    assert found["time below TRL ChunkedLogProbFunction"].passed
    assert found["memory below TRL ChunkedLogProbFunction"].passed
    assert not found["error of d_hidden"].passed, "what was not measured cannot hold"
    failed = row("trl", status="fails")
    assert not any("TRL" in verdict.target for verdict in verdicts([ours, failed]))


def test_report_writes_every_file(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmark import report

    sizes = ("4096x64x1000", "8192x64x1000")
    rows = [row(name, ms=1.0, mm=4.0, peak_bytes=10) for name in ("ours", "trl")]
    rows += [row(case="inactive", ms=1.0, mm=2.0, peak_bytes=10), row("verl", status="fails: x|y")]
    for case in ("tokens", "vocabulary"):
        rows += [
            Row(case, "random", size, "float32", "ours", ms=1.0, peak_bytes=9) for size in sizes
        ]
    report.write(Run(dict(ENVIRONMENT), rows), tmp_path, Console(quiet=True, width=160))
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["cases.png", "growth.png", "results.json", "results.md", "rivals.png"]
    text = (tmp_path / "results.md").read_text()
    assert "verl linear_cross_entropy: fails: x/y" in text
    assert "python -m benchmark" in text
    assert "**FAIL**" in text
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == len(rows)


def test_the_command_line_takes_every_name():
    options = parser().parse_args(["--case", "dense", "tokens", "--against", "trl", "--memory"])
    assert options.case == ["dense", "tokens"]
    assert options.memory
    with pytest.raises(SystemExit):
        parser().parse_args(["--shape", "8192x4096"])


def test_a_contender_that_takes_the_gpu_down_ends_the_run(tmp_path, monkeypatch):
    """Whatever is measured afterwards would fail, too, and look like a fault of its own."""

    def refuse(device):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(bench, "load", lambda name, job: lambda problem: 1 / 0)
    monkeypatch.setattr(bench.measure, "synchronize", refuse)
    right, result = run(plan(tmp_path, cases=["dense", "frozen"]))
    assert not right
    assert result.rows == []

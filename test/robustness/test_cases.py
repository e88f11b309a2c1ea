"""docs/robustness.md names, for every fault that users have met, a test that exists."""

import ast
import re
from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (A\d\d) \| .*\(\S+#\d+\) \| .+ \| (`\S+`(?:, `\S+`)*) \|$", re.MULTILINE)


def test_each_case_has_a_test() -> None:
    page = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert [case for case, _ in rows] == [f"A{number:02}" for number in range(1, 49)]
    missing = []
    for case, tests in rows:
        for file, name in re.findall(r"`(\S+?)::(\w+)`", tests):
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            if name not in found:
                missing.append(f"{case}: {file}::{name}")
    assert not missing


def test_every_planted_fault_fits_its_file() -> None:
    """test/mutants.py follows the sources: what it replaces stands there exactly once."""
    sources = ROOT / "src" / "ratio_kl"
    stale = [
        f"{mutant.file}: {mutant.old!r}"
        for mutant in MUTANTS
        if (sources / mutant.file).read_text(encoding="utf-8").count(mutant.old) != 1
    ]
    assert not stale

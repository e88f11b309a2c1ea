"""Run the benchmarks chosen by a flag, or all of them; other arguments go to each of them."""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def summaries() -> dict[str, str]:
    """Name and first line of the docstring of each benchmark: the modules beside this one."""
    paths = (path for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("_"))
    documented = {p.stem: ast.get_docstring(ast.parse(p.read_text("utf-8"))) or "" for p in paths}
    return {name: doc.partition("\n")[0] for name, doc in documented.items()}


def main() -> int:
    """Each benchmark runs in a process of its own, so that none sees another's memory."""
    benchmarks = summaries()
    parser = argparse.ArgumentParser(prog="python -m benchmark", description=__doc__)
    for name, summary in benchmarks.items():
        parser.add_argument(f"--{name}", action="store_true", help=summary)
    asked, others = parser.parse_known_args()
    chosen = [name for name in benchmarks if getattr(asked, name)] or list(benchmarks)
    codes = []
    for name in chosen:
        print(f"{name}: {benchmarks[name]}", flush=True)
        command = [sys.executable, "-m", f"benchmark.{name}", *others]
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())

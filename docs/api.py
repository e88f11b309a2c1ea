"""Writes docs/api.md, the API reference, from sources and docstrings: python -m docs.api.

Sources are read, never imported, so that the page is the same whichever packages are installed.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ratio_kl.field_docs import field_docs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ratio_kl"
PAGE = ROOT / "docs" / "api.md"
HEAD = """\
<!-- Written by `make docs`; edit the docstrings instead. -->

# API reference

Every public name, module by module. H is the hidden size, V the rows of the head, B sequences of T
tokens, N tokens in all, S packed sequences.
"""


class Definition(NamedTuple):
    """Where a public name is defined."""

    path: Path
    node: ast.ClassDef | ast.FunctionDef


def public_modules() -> dict[str, Path]:
    """Dotted name -> file: the package itself, the fronts that state `__all__`, the reference."""
    fronts = (path for path in sorted(PACKAGE.glob("compat/*.py")) if public_names(path))
    return {
        "ratio_kl": PACKAGE / "__init__.py",
        **{f"ratio_kl.compat.{path.stem}": path for path in fronts},
        "ratio_kl.reference": PACKAGE / "reference.py",
    }


def public_names(path: Path) -> list[str]:
    """What `__all__` of a file lists."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def definition(path: Path, name: str) -> Definition:
    """Follow a name from the file that shows it to the file that defines it."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Definition(path, node)
        if not (isinstance(node, ast.ImportFrom) and node.level):
            continue
        if name in (alias.name for alias in node.names):
            folder = path.parents[node.level - 1]
            target = folder.joinpath(*(node.module or "").split("."))
            init = target / "__init__.py"
            return definition(init if init.exists() else target.with_suffix(".py"), name)
    raise LookupError(f"{path} shows {name}, which is no function or class of this package")


def page() -> str:
    """The whole page."""
    written: dict[tuple[Path, str], str] = {}
    lines = [HEAD]
    for module, path in public_modules().items():
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        lines += [f"## {module}", markdown(docstring)]
        for name in public_names(path):
            found = definition(path, name)
            title = f"{module}.{name}"
            key = found.path, found.node.name
            lines.append(f"### {title}")
            if key in written:
                anchor = written[key].replace(".", "").lower()
                lines.append(f"[`{written[key]}`](#{anchor}).")
            else:
                written[key] = title
                lines += described(found)
    return "\n\n".join(line.strip() for line in lines) + "\n"


def described(found: Definition) -> Iterator[str]:
    """Signature, docstring, fields and methods."""
    source, node = found.path.read_text("utf-8").splitlines(), found.node
    docstring = markdown(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        yield from (signature(node, source), docstring)
        return
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    yield from (signature(part, source) for part in methods if part.name == "__init__")
    yield docstring
    fields = {
        ast.get_source_segment("\n".join(source), part): part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and not part.target.id.startswith("_")
    }
    docs = field_docs(node)
    if fields:
        yield "**Fields**"
        yield "\n".join(item(str(text), docs[name]) for text, name in fields.items())
    for part in methods:
        if not part.name.startswith("_") and ast.get_docstring(part):
            yield f"#### {node.name}.{part.name}"
            yield from (signature(part, source), markdown(ast.get_docstring(part) or ""))


def signature(function: ast.FunctionDef, source: list[str]) -> str:
    """The lines from a function's decorators to its body, as they are written."""
    first = min(part.lineno for part in (function, *function.decorator_list)) - 1
    lines = source[first : function.body[0].lineno - 1]
    return f"```python\n{textwrap.dedent(chr(10).join(lines)).rstrip(':')}\n```"


def markdown(docstring: str) -> str:
    """A docstring as Markdown: sections as bold words, what they name as a list."""
    section = r"^(Args|Returns|Raises):\n((?:    .*\n|\n)+)"
    prose, *sections = re.split(section, docstring + "\n", flags=re.M)
    parts = [prose]
    for name, body, after in zip(*[iter(sections)] * 3, strict=True):
        entries = re.split(r"^    (?! )", body, flags=re.M)[1:]
        if name == "Returns":
            text = textwrap.dedent(body)
        else:
            text = "\n".join(item(*entry.split(":", 1)) for entry in entries)
        parts += [f"**{name}**", text, after]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def item(name: str, text: str) -> str:
    """One entry of a list, wrapped."""
    name, text = " ".join(name.split()), " ".join(text.split())
    line = f"- `{name}`: {text}" if text else f"- `{name}`"
    return textwrap.fill(
        line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

"""The code blocks of the Markdown pages.

A block runs with those before it on its page, unless a comment stands right above it:

    <!-- not run here: needs DeepSpeed -->
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FENCED = re.compile(
    r"(?:^<!-- not run here: (?P<reason>[^\n]*) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.M | re.S,
)


class Block(NamedTuple):
    page: str
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    reason: str | None
    """Why it does not run with the others."""


def blocks(page: str, language: str, section: str | None = None) -> list[Block]:
    """A page's blocks of a language, those below a heading ("## TRL") only if one is given."""
    text = (ROOT / page).read_text("utf-8")
    start, end = 0, len(text)
    if section is not None:
        level = re.escape(section.split()[0])
        found = re.search(rf"^{re.escape(section)}\n.*?(?=^{level} |\Z)", text, re.M | re.S)
        assert found, f"{page} has no section {section}"
        start, end = found.span()
    return [
        Block(page, text.count("\n", 0, m.start("code")) + 1, language, m["code"], m["reason"])
        for m in FENCED.finditer(text, start, end)
        if m["language"] == language
    ]


def run(block: Block, scope: dict[str, Any]) -> None:
    """Execute a block of Python; a traceback names the page and its line."""
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, ROOT / block.page, "exec"), scope)

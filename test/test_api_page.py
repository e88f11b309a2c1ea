"""docs/api.md: up to date, and complete."""

import ast
from importlib import import_module

import pytest

from docs import api

PUBLIC = api.public_modules()

DOCSTRING = """\
Sum of two numbers.

    a + b

Args:
    a, b:
        any,
        of any size.
    rest: ignored.

Returns:
    The sum,
    in full.

Raises:
    TypeError: no numbers.

Reference: none.
"""
MARKDOWN = """\
Sum of two numbers.

    a + b

**Args**

- `a, b`: any, of any size.
- `rest`: ignored.

**Returns**

The sum,
in full.

**Raises**

- `TypeError`: no numbers.

Reference: none."""


def test_a_docstring_as_markdown():
    assert api.markdown(DOCSTRING) == MARKDOWN


def test_the_page_is_up_to_date():
    assert api.PAGE.read_text("utf-8") == api.page(), "run `make docs`"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_it(module):
    """Read off the modules that are imported, where the page is made from their sources."""
    try:
        names = import_module(module).__all__
    except ImportError as error:
        pytest.skip(str(error))
    page = api.PAGE.read_text("utf-8")
    assert names
    for name in names:
        assert f"\n### {module}.{name}\n" in page


def test_every_front_states_its_public_names():
    """A module of compat without `__all__` is a piece of a front that has it."""
    pieces = {path for path in api.PACKAGE.glob("compat/*.py") if path.stem != "__init__"}
    pieces -= set(PUBLIC.values())
    imported = {
        node.module
        for path in api.PACKAGE.glob("compat/*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level == 1
    }
    assert {path.stem for path in pieces} <= imported


def test_a_name_from_elsewhere_is_an_error(tmp_path):
    path = tmp_path / "front.py"
    path.write_text("from math import pi\n__all__ = ['pi']\n")
    with pytest.raises(LookupError, match="shows pi, which is no function or class"):
        api.definition(path, "pi")

"""Docstrings under fields: read from a class's source, and shown by help()."""

import ast
import inspect
import pydoc
from dataclasses import fields
from typing import NamedTuple

import pytest

import ratio_kl
from ratio_kl.field_docs import field_docs, with_field_docs

SOURCE = '''
class Options:
    """Of a test."""

    first: int = 1
    """One line."""
    second: float
    """Two
    lines."""
    third: str
    plain = 3
    """Not under an annotated field."""

    def method(self) -> None:
        """Not a field."""
'''


def sizes():
    """A new class each time."""

    class Sizes(NamedTuple):
        """Of a test."""

        width: int
        """Across,
        in tokens."""
        height: int

    return Sizes


def test_each_field_with_its_docstring():
    (definition,) = ast.parse(SOURCE).body
    docs = field_docs(definition)
    assert docs == {"first": "One line.", "second": "Two\nlines.", "third": ""}


def test_they_follow_the_class_docstring():
    shown = with_field_docs(sizes()).__doc__
    assert shown == "Of a test.\n\nFields:\n    width: Across,\n        in tokens.\n    height"


def test_a_class_without_source_or_docstring_stays_as_it_is():
    made = type("Made", (), {"__doc__": "As it was.", "__module__": "nowhere"})
    assert with_field_docs(made).__doc__ == "As it was."
    undocumented = sizes()
    undocumented.__doc__ = None  # as under python -OO
    assert with_field_docs(undocumented).__doc__ is None


@pytest.mark.parametrize("name", ["LogProbs", "LossOutput", "Metrics", "RatioKLConfig"])
def test_help_shows_every_field(name):
    public = getattr(ratio_kl, name)
    names = [f.name for f in fields(public)] if name == "RatioKLConfig" else public._fields
    shown = pydoc.plain(pydoc.render_doc(public)).partition("Fields:")[2]
    assert names
    for field in names:
        assert f"{field}: " in shown or field == "metrics", field


def test_every_option_has_a_docstring():
    (definition,) = ast.parse(inspect.getsource(ratio_kl.RatioKLConfig)).body
    docs = field_docs(definition)
    assert list(docs) == [field.name for field in fields(ratio_kl.RatioKLConfig)]
    assert all(docs.values())

"""Docstrings that stand under the fields of a class, made part of the class's own."""

import ast
import inspect
import textwrap
from itertools import zip_longest
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def field_docs(definition: ast.ClassDef) -> dict[str, str]:
    """The docstring under each annotated field of a class, "" where there is none."""
    docs = {}
    for statement, after in zip_longest(definition.body, definition.body[1:]):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        docs[statement.target.id] = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[statement.target.id] = inspect.cleandoc(str(after.value.value))
    return docs


def with_field_docs(cls: Class) -> Class:
    """Append the docstrings of a class's fields to its own, so that help() shows them."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):  # compiled or frozen: no source to read
        return cls
    if cls.__doc__ is None or not isinstance(definition, ast.ClassDef):  # python -OO
        return cls
    listed = [
        textwrap.indent(f"{name}: {doc}" if doc else name, "    ").replace("\n", "\n    ")
        for name, doc in field_docs(definition).items()
    ]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Fields:", *listed])
    return cls

"""Whether a front takes what its package takes."""

import inspect
from collections.abc import Callable
from typing import Any


def assert_same_call(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Same names, order, kinds and defaults; what ours has beside is keyword-only and optional."""
    expected = [p for name, p in inspect.signature(theirs).parameters.items() if name != "ctx"]
    parameters = list(inspect.signature(ours).parameters.values())
    given, beside = parameters[: len(expected)], parameters[len(expected) :]
    assert [(p.name, p.kind, p.default) for p in given] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    for parameter in beside:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
        assert parameter.default is not inspect.Parameter.empty, parameter

"""Registering a function as a torch operator."""

from collections.abc import Callable
from typing import Any

import torch


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function with typed arguments the operator ratio_kl::<name>; returns the operator.

    What torch.library.custom_op does, less its look at every call for results that alias
    arguments, which costs more time than a small launch. So an implementation must return new
    tensors; torch.library.opcheck in the tests sees to that.
    """

    def register(function: Callable[..., Any]) -> Any:
        qualified = f"ratio_kl::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "CompositeExplicitAutograd", func=_untraced(function))
        return getattr(torch.ops.ratio_kl, name).default

    return register


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, into which torch.compile does not look when it runs an operator eagerly."""
    guarded: list[Callable[..., Any]] = []

    def implementation(*args: Any) -> Any:
        if not guarded:
            # At the first call: this imports the compiler, which takes longer than all of torch.
            guarded.append(torch.compiler.disable(function))
        return guarded[0](*args)

    return implementation

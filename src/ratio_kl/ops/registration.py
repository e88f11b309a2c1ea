"""Registering a function as a torch operator, and its gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback


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


def differentiable(
    op: Any, backward: Callable[..., Any], save: Callable[..., None] | None = None
) -> None:
    """Give the operator an autograd formula.

    What torch.library.register_autograd does, less its filling in of default arguments, of which
    our operators have none: for fifteen arguments that takes longer than a small launch.

    Args:
        backward: (ctx, *gradients of the results) -> gradients of the arguments.
        save: (ctx, arguments, results) -> None.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = op(*args)
            if save is not None:
                save(ctx, args, results)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    listed = op._schema.returns[0].type.kind() == "ListType"

    def implementation(*args: Any) -> Any:
        needed = (isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if torch.is_grad_enabled() and any(needed):
            results = Gradient.apply(*args)
            return list(results) if listed else results
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    torch.library.impl(op.name(), "Autograd", func=_untraced(implementation))


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, into which torch.compile does not look when it runs an operator eagerly."""
    guarded: list[Callable[..., Any]] = []

    def implementation(*args: Any) -> Any:
        if not torch.compiler.is_compiling() and get_eval_frame_callback() is None:
            # No compiler is at work in this thread.
            return function(*args)
        if not guarded:
            # At the first such call: for this imports the compiler. On a line of its own: torch 2.8
            # breaks a graph there, and could not go on in the middle of the append.
            made = torch.compiler.disable(function)
            guarded.append(made)
        return guarded[0](*args)

    return implementation

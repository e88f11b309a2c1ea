"""Registering a function as a torch operator, and its gradient.

torch's dispatcher asks every layer that may want to see a call (compilers, function transforms,
tensor subclasses, profilers), which for fifteen arguments takes longer than a small launch. So
where there is no such layer the function is called directly.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback


class Operator:
    """A function that is the operator ratio_kl::<name>, too. Calls are alike either way."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        qualified = f"ratio_kl::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "CompositeExplicitAutograd", func=_untraced(function))
        self.overload = getattr(torch.ops.ratio_kl, name).default
        self.function = self.direct = function
        """The function, without and with its gradient, for where no layer is in between."""

    def __call__(self, *args: Any) -> Any:
        return self.direct(*args) if _is_plain(args) else self.overload(*args)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function with typed arguments the operator ratio_kl::<name>.

    What torch.library.custom_op does, less its look at every call for results that alias
    arguments, which costs more time than a small launch. So an implementation must return new
    tensors; torch.library.opcheck in the tests sees to that.
    """
    return lambda function: Operator(name, function)


def differentiable(
    op: Operator, backward: Callable[..., Any], save: Callable[..., None] | None = None
) -> None:
    """Give the operator an autograd formula.

    What torch.library.register_autograd does, less its filling in of default arguments, of which
    our operators have none: for fifteen arguments that takes longer than a small launch.

    Args:
        backward: (ctx, *gradients of the results) -> gradients of the arguments.
        save: (ctx, arguments, results) -> None.
    """

    def dispatched(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.overload(*args)

    op.direct = _with_gradient(op, op.function, backward, save)
    through = _with_gradient(op, dispatched, backward, save)
    torch.library.impl(op.overload.name(), "Autograd", func=_untraced(through))


def _with_gradient(
    op: Operator,
    compute: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., None] | None,
) -> Callable[..., Any]:
    """`compute`, recorded by autograd where a gradient is wanted."""

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = compute(*args)
            if save is not None:
                save(ctx, args, results)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    listed = op.overload._schema.returns[0].type.kind() == "ListType"

    def implementation(*args: Any) -> Any:
        if (
            torch.is_grad_enabled()
            and not _is_below_autograd()
            and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        ):
            results = Gradient.apply(*args)
            return list(results) if listed else results
        return compute(*args)

    return implementation


def _is_below_autograd() -> bool:
    """Whether the dispatcher passes autograd by, as in inference mode, whatever the grad mode."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)


_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, str, torch.dtype}

_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_NO_LISTENER = (
    _INFERENCE | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView),
    _INFERENCE,
)
"""What the dispatcher asks in every call, in inference mode the latter. Dispatch modes, transforms
of either vmap, tracers and functionalization each add a key of theirs."""


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether nothing of torch wants to see this call: it is eager, on tensors of a real device."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, args))
        and args[0].device.type in ("cuda", "cpu")
        and get_eval_frame_callback() is None
        and torch._C._dispatch_tls_local_include_set() in _NO_LISTENER
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
    )


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

"""Each of the two passes alone: the operators below the public calls, on inputs made ready before.

For the host's time of a pass. That what they compute is right the other cases see.
"""

from collections.abc import Callable
from typing import Any

import torch

from ratio_kl.ops.contract import DEFAULT_CHUNK_BYTES
from ratio_kl.ops.operators import linear_logprob_backward_op, linear_scores_op

from .policy_loss import policy_loss
from .problem import Problem
from .rivals import Outcome

Pass = Callable[[], Any]

_MODIFIERS = (None, None, None)
"""No temperature, scale or softcap."""


def alone(make: Callable[[Problem], tuple[Pass, Outcome]]) -> Callable[[Problem], Outcome]:
    """A contender's call that runs a pass, and answers with what was known when it was made."""
    # By identity; the problems are kept so that none of them can be taken for another.
    ready: dict[int, tuple[Pass, Outcome, Problem]] = {}

    def call(problem: Problem) -> Outcome:
        known = ready.get(id(problem))
        if known is None:
            known = ready[id(problem)] = *make(problem), problem
        run, outcome, _ = known
        run()
        return outcome

    return call


def pass_one(problem: Problem) -> tuple[Pass, Outcome]:
    """Log-probabilities of every token."""
    hidden, weight, ids = _inputs(problem)
    others = None, *_MODIFIERS, len(weight), *_options(problem)

    def run() -> Any:
        return linear_scores_op(hidden, weight, None, ids, *others)

    return run, Outcome(run()[0].view(problem.action_ids.shape))


def pass_two(problem: Problem) -> tuple[Pass, Outcome]:
    """Gradients of hidden and weight under the policy loss."""
    hidden, weight, ids = _inputs(problem)
    others = None, *_MODIFIERS, len(weight), *_options(problem)
    logps, entropies, peak, log_sum, *_ = linear_scores_op(hidden, weight, None, ids, *others)
    shaped = logps.view(problem.action_ids.shape)
    with torch.enable_grad():
        leaf = shaped.detach().requires_grad_()
        (grads,) = torch.autograd.grad(policy_loss(problem, leaf, None), leaf)
    scores = logps, entropies, peak, log_sum, grads.flatten(), None
    options = len(weight), hidden.dtype, "", DEFAULT_CHUNK_BYTES, True, True, False, False

    def run() -> Any:
        return linear_logprob_backward_op(hidden, weight, None, ids, *_MODIFIERS, *scores, *options)

    return run, Outcome(shaped)


def _inputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        problem.hidden.detach().flatten(0, 1),
        problem.weight.detach(),
        problem.action_ids.flatten(),
    )


def _options(problem: Problem) -> tuple[Any, ...]:
    return problem.hidden.dtype, False, False, "", DEFAULT_CHUNK_BYTES, "later"

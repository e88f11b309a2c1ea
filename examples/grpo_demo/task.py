"""The task: add two one-digit numbers, and answer with the equation and nothing else.

Asked "What is 6 + 6?", the untrained model chats ("To solve this, we need to isolate ..."). It can
add, though, once it has written "6 + 6 = ", so there is something for rewards to find.
"""

import random
import re
from typing import NamedTuple


class Problem(NamedTuple):
    """The sum a + b of two one-digit numbers."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The question in SmolLM2's chat format; every problem has the same number of tokens."""
        return f"<|im_start|>user\nWhat is {self.a} + {self.b}?<|im_end|>\n<|im_start|>assistant\n"


def reward(problem: Problem, reply: str, finished: bool) -> float:
    """Half a point for the right sum, half for a reply that is the equation alone.

    Args:
        reply: the text of the completion, without the end token.
        finished: whether the model ended the reply itself.

    Returns:
        0, 0.5 or 1. The sum is right if the last number of the reply is; the form is right if the
        finished reply reads "a + b = n", whatever n is.
    """
    numbers = re.findall(r"\d+", reply)
    is_right = bool(numbers) and int(numbers[-1]) == problem.a + problem.b
    equation = rf"\s*{problem.a} \+ {problem.b} = \d+\s*"
    is_equation = finished and re.fullmatch(equation, reply) is not None
    return 0.5 * is_right + 0.5 * is_equation


def split(held_out_pairs: int = 15) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and problems held out, always the same ones.

    a + b and b + a fall on the same side, so that no held-out sum is seen in training turned round.
    """
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random(0).shuffle(pairs)
    held_out = set(pairs[:held_out_pairs])
    problems = [Problem(a, b) for a in range(10) for b in range(10)]
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem in problems:
        sides[(min(problem), max(problem)) in held_out].append(problem)
    return sides

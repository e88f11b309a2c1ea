"""What is measured. A new case is a row of CASES."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import shapes
from .problem import Problem, half_inactive, half_zero

ALL = ("eager", "compiled", "trl", "liger_ce", "liger_grpo", "verl", "cce", "quack")
TOKEN_HEADS = ("ours_compiled", "compiled", "trl", "liger_ce")
FORWARD = ("eager", "compiled", "trl", "liger_ce", "verl", "cce")
ON_CPU = ("eager", "trl", "liger_ce")
"""Where nothing else is asked for, on a CPU: those that need no minutes of compilation."""


@dataclass(frozen=True)
class Case:
    """One question. Masks and advantages are made by `Case.thin`."""

    title: str
    shapes: Mapping[str, tuple[shapes.Shape, ...]]
    """By device type."""
    against: tuple[str, ...]
    """Rivals measured unless others are named."""
    job: str = "loss"
    """"loss": forward and backward of the policy loss; "forward": log-probabilities under
    no_grad; "logits": `ratio_kl` from logits, under no_grad; "pass_one", "pass_two": one of our
    operators."""
    inactive: bool = False
    """Half of the tokens are masked out."""
    zero: bool = False
    """Half of the sequences have advantage 0."""
    quantile: float = 1.0
    frozen: bool = False
    entropy: bool = False
    """Forward: with the entropy of each token."""
    sweep: str = ""
    """The size that grows: "tokens" or "vocabulary"."""
    host: bool = False
    """Report the host's time of a call on an idle device, too."""
    errors: bool = True
    """Compare with float64 at full size."""

    def thin(self, problem: Problem, seed: int) -> Problem:
        """The problem with this case's mask, advantages and options."""
        weight = problem.weight.detach().requires_grad_(not self.frozen)
        mask = half_inactive(problem.mask, seed) if self.inactive else problem.mask
        advantages = half_zero(problem.advantages) if self.zero else problem.advantages
        return replace(
            problem,
            weight=weight,
            mask=mask,
            advantages=advantages,
            quantile=self.quantile,
            masked=self.job == "loss" or self.inactive,
            with_entropy=self.entropy,
        )

    def rivals(self, device_type: str) -> tuple[str, ...]:
        if device_type == "cuda" or self.against == ALL:
            return self.against
        return tuple(name for name in self.against if name in ON_CPU) or self.against


CASES = {
    "dense": Case("every token active", shapes.MAIN, ALL),
    "inactive": Case("half of the tokens inactive", shapes.MAIN, TOKEN_HEADS, inactive=True),
    "zero": Case("half of the sequences with advantage 0", shapes.MAIN, TOKEN_HEADS, zero=True),
    "inactive_zero": Case(
        "half inactive, half of the rest with advantage 0",
        shapes.MAIN,
        TOKEN_HEADS,
        inactive=True,
        zero=True,
    ),
    "quantile": Case(
        "half inactive, the 20 % of highest entropy kept",
        shapes.MAIN,
        TOKEN_HEADS,
        inactive=True,
        quantile=0.2,
    ),
    "frozen": Case("frozen head", shapes.MAIN, TOKEN_HEADS, frozen=True),
    "forward": Case("forward only", shapes.MAIN, FORWARD, job="forward"),
    "forward_entropy": Case(
        "forward only, with entropy", shapes.MAIN, ("trl", "verl"), job="forward", entropy=True
    ),
    "logits": Case("ratio and KL from logits", shapes.LOGITS, ("eager", "compiled"), job="logits"),
    "small": Case(
        "few tokens, forward only", shapes.SMALL_TOKENS, ("trl",), job="forward", host=True
    ),
    "pass_one": Case("pass 1 alone, its operator", shapes.HOST, (), job="pass_one", host=True),
    "pass_two": Case("pass 2 alone, its operator", shapes.HOST, (), job="pass_two", host=True),
    "tokens": Case(
        "growth with the number of tokens",
        shapes.TOKENS,
        ("eager", "compiled", "trl", "liger_ce"),
        sweep="tokens",
        errors=False,
    ),
    "vocabulary": Case(
        "growth with the vocabulary",
        shapes.VOCABULARY,
        ("eager", "compiled", "trl", "liger_ce"),
        sweep="vocabulary",
        errors=False,
    ),
}

ROLLOUTS = {
    "rollouts": Case("rollouts with their own mask and advantages", {}, ALL),
    "rollouts_dense": Case("rollouts, every token active", {}, ALL),
}
"""Cases on the hidden states, head, mask and advantages of a file; measured with --inputs."""

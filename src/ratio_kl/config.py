"""Every option that changes the mathematics of the loss, in one frozen dataclass.

The meaning of each option is documented once, under its field. Names follow TRL's GRPOConfig
where TRL has the option. How and over which ranks a loss is computed (backend, chunk_bytes,
process groups) is said by arguments of the module.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .field_docs import with_field_docs

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence", "sequence_token")
KL_ESTIMATORS = ("k1", "k2", "k3")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class RatioKLConfig:
    """Options of the policy loss. Immutable, picklable, comparable, hashable.

    Raises:
        TypeError: an option has the wrong Python type (None where None has no meaning, too).
        ValueError: an option lies outside its allowed values, or asks for something that the
            chosen loss type cannot do. The message names the option, the value and the range.
    """

    loss_type: str = "dapo"
    """Which policy term and which reduction: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo",
    "vespo" or "luspo"."""

    importance_sampling_level: str = "token"
    """Level of the importance ratio: "token" (PPO), "sequence" (GSPO) or "sequence_token"
    (GSPO-token). vespo knows "token" only."""

    beta: float = 0.0
    """Weight of the KL to the reference, >= 0. At 0 no reference is needed and none is scored."""

    kl_estimator: str = "k3"
    """Estimator of KL(policy || reference) from the sampled token: "k1", "k2" or "k3"."""

    use_bias_correction_kl: bool = False
    """Multiply the KL by the importance ratio, so that it is unbiased for stale samples."""

    epsilon_low: float = 0.2
    """The ratio is clipped below at 1 - epsilon_low; in [0, 1)."""

    epsilon_high: float | None = None
    """The ratio is clipped above at 1 + epsilon_high, >= 0; None means epsilon_low. For cispo it
    is the bound itself, and cispo must name it: the inherited 0.2 would cap every ratio."""

    delta: float | None = None
    """Upper cap of the unclipped ratio (two-sided clipping), > 0; None is no cap. Loss types with
    the clip term only."""

    max_completion_length: int | None = None
    """The constant length by which dr_grpo divides, > 0; dr_grpo must name it."""

    sapo_temperature_pos: float = 1.0
    """Temperature of sapo's gate where the advantage is positive, > 0."""

    sapo_temperature_neg: float = 1.05
    """Temperature of sapo's gate where the advantage is not positive, > 0."""

    vespo_k_pos: float = 2.0
    """Exponent k of vespo's weight for advantages >= 0; itself >= 0."""

    vespo_lambda_pos: float = 3.0
    """Rate lambda of vespo's weight for advantages >= 0; itself >= 0, floored at 1e-4."""

    vespo_k_neg: float = 3.0
    """Exponent k of vespo's weight for negative advantages; >= 0."""

    vespo_lambda_neg: float = 2.0
    """Rate lambda of vespo's weight for negative advantages; >= 0, floored at 1e-4."""

    top_entropy_quantile: float = 1.0
    """Share of the active tokens, those of highest entropy over the whole group of ranks, that
    keep their policy term; in [0, 1]. 1 is off."""

    off_policy_mask_threshold: float | None = None
    """Drop the policy term of sequences with a negative advantage whose mean
    (sampling log-prob - log-prob) exceeds this; None is off."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which is subtracted from the loss. A call may override it."""

    log_ratio_limit: float | None = 20.0
    """Log-ratios are clamped to +-this before they are exponentiated, > 0; None is no clamp (then
    exp may overflow)."""

    temperature: float = 1.0
    """Sampling temperature by which the logits are divided, > 0. A call may override it with a
    float or a tensor."""

    logit_scale: float = 1.0
    """Factor on the logits before the softcap (Cohere, Granite), > 0."""

    softcap: float | None = None
    """Final logit softcapping c * tanh(x / c) (Gemma), > 0; None is off."""

    vocab_size: int | None = None
    """Number of real rows of the lm_head weight; later rows are padding and left out. > 0; None
    means all rows."""

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES, hints=_OTHER_NAMES)
        check_choice(
            "importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS
        )
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_bool("use_bias_correction_kl", self.use_bias_correction_kl)
        for name in _REAL_OPTIONS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, float(check_real_option(name, value)))
        for name in ("max_completion_length", "vocab_size"):
            value = getattr(self, name)
            if value is not None:
                check_positive_int(name, value)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                "epsilon_high must be named for loss_type='cispo' (it is the bound of the ratio "
                "itself there, so the default inherited from epsilon_low would cap every ratio); "
                "got None"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length must be named for loss_type='dr_grpo', which divides by "
                "it; got None"
            )
        if self.delta is not None and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(
                f"delta caps the ratio of the clip term, which loss_type={self.loss_type!r} does "
                f"not have; got delta={self.delta!r}, expected None"
            )
        if self.loss_type == "vespo" and self.importance_sampling_level != "token":
            raise ValueError(
                "loss_type='vespo' has its own sequence-level weight and takes "
                "importance_sampling_level='token' only; got "
                f"{self.importance_sampling_level!r}"
            )

    @property
    def upper_epsilon(self) -> float:
        """epsilon_high, or epsilon_low where epsilon_high is None."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high


_OTHER_NAMES = {
    "gspo": ": that is loss_type='grpo' with importance_sampling_level='sequence'",
    "gspo_token": ": that is loss_type='grpo' with importance_sampling_level='sequence_token'",
    "ppo": ": that is loss_type='bnpo' with advantages of each token and old_logps",
}

_OPTIONAL = frozenset(
    {"epsilon_high", "delta", "off_policy_mask_threshold", "log_ratio_limit", "softcap"}
)

# Allowed values in words, and their test, which NaN fails.
_REAL_OPTIONS = {
    "beta": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "epsilon_low": ("in [0, 1)", lambda x: 0 <= x < 1),
    "epsilon_high": (">= 0", lambda x: x >= 0),
    "delta": ("> 0", lambda x: x > 0),
    "sapo_temperature_pos": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "sapo_temperature_neg": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "vespo_k_pos": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "vespo_lambda_pos": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "vespo_k_neg": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "vespo_lambda_neg": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "top_entropy_quantile": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "off_policy_mask_threshold": ("a number, not NaN", lambda x: x == x),
    "entropy_coef": ("finite", lambda x: -math.inf < x < math.inf),
    "log_ratio_limit": ("> 0", lambda x: x > 0),
    "temperature": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "logit_scale": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "softcap": ("> 0 and finite", lambda x: 0 < x < math.inf),
}


def _wrong_type(name: str, value: object, expected: str) -> TypeError:
    return TypeError(f"{name} must be {expected}; got {value!r} of type {type(value).__name__}")


def check_choice(
    name: str,
    value: object,
    allowed: tuple[str, ...],
    *,
    or_none: bool = False,
    hints: Mapping[str, str] | None = None,
) -> None:
    """TypeError unless `value` is a str, or None where that is allowed; ValueError unless it is one
    of `allowed`. `hints` end the message for some others."""
    if (isinstance(value, str) and value in allowed) or (value is None and or_none):
        return
    expected = f"one of {', '.join(allowed)}{' or None' if or_none else ''}"
    if not isinstance(value, str):
        raise _wrong_type(name, value, expected)
    raise ValueError(f"{name} must be {expected}; got {value!r}{(hints or {}).get(value, '')}")


def check_real_option(option: str, value: Any, *, name: str | None = None) -> float:
    """`value`, if it is allowed for the real-valued `option`; `name` is what the caller calls it.

    Raises:
        TypeError: it is no real number (None and bool are none).
        ValueError: it is outside the allowed values; the message says which they are.
    """
    allowed, holds = _REAL_OPTIONS[option]
    name = name or option
    if not _is_a((float, Real), value):
        raise _wrong_type(name, value, f"a number {allowed}")
    # An int or a Fraction becomes a float; a compiler's symbolic float stays symbolic.
    number = value if isinstance(value, float) else as_float(name, value)
    if not holds(number):
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
    return number


def _is_a(kinds: tuple[type, type], value: object) -> bool:
    """isinstance, but a bool is no number. A concrete type comes first: it is asked faster."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def as_float(name: str, value: Any) -> float:
    """A real number as a float, ValueError where that would overflow."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float; got a number beyond its range") from None


def check_bool(name: str, value: object) -> None:
    """TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "a bool")


def check_int(name: str, value: Any, expected: str = "an int") -> None:
    """TypeError unless `value` is an int."""
    if not _is_a((int, Integral), value):
        raise _wrong_type(name, value, expected)


def check_positive_int(name: str, value: Any) -> None:
    """TypeError unless `value` is an int, ValueError unless it is at least 1."""
    check_int(name, value, "an int > 0")
    if value < 1:
        raise ValueError(f"{name} must be an int > 0; got {value!r}")
    if value >= 2**63:
        raise ValueError(f"{name} must be an int that fits 64 bits; got {value!r}")

"""Every option: what it allows, what it refuses and how it says so."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction

import pytest

from ratio_kl.config import (
    IMPORTANCE_SAMPLING_LEVELS,
    KL_ESTIMATORS,
    LOSS_TYPES,
    RatioKLConfig,
    check_real_option,
)

INF, NAN = math.inf, math.nan

# option: (allowed values, values out of range); None is listed where it has a meaning.
NUMBERS = {
    "beta": ([0, 0.04, 3], [-0.1, INF, NAN]),
    "epsilon_low": ([0, 0.2, 0.99], [-0.1, 1.0, NAN]),
    "epsilon_high": ([None, 0, 0.28, 5.0], [-0.1, NAN]),
    "delta": ([None, 0.5, 4], [0, -1.0, NAN]),
    "sapo_temperature_pos": ([0.5, 2], [0, -1.0, INF, NAN]),
    "sapo_temperature_neg": ([0.5, 2], [0, -1.0, INF, NAN]),
    "vespo_k_pos": ([0, 2.5], [-0.1, INF, NAN]),
    "vespo_lambda_pos": ([0, 2.5], [-0.1, INF, NAN]),
    "vespo_k_neg": ([0, 2.5], [-0.1, INF, NAN]),
    "vespo_lambda_neg": ([0, 2.5], [-0.1, INF, NAN]),
    "top_entropy_quantile": ([0, 0.2, 1], [-0.1, 1.1, NAN]),
    "off_policy_mask_threshold": ([None, -1.0, 0, 0.5, INF], [NAN]),
    "entropy_coef": ([-0.1, 0, 0.1], [INF, -INF, NAN]),
    "log_ratio_limit": ([None, 0.1, 20], [0, -1.0, NAN]),
    "temperature": ([0.1, 2], [0, -1.0, INF, NAN]),
    "logit_scale": ([0.0625, 2], [0, -1.0, INF, NAN]),
    "softcap": ([None, 30], [0, -1.0, INF, NAN]),
}
COUNTS = ("max_completion_length", "vocab_size")
CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": IMPORTANCE_SAMPLING_LEVELS,
    "kl_estimator": KL_ESTIMATORS,
}
NEEDED = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 100}}


def assert_names(error: pytest.ExceptionInfo, *words: object) -> None:
    for word in words:
        assert str(word) in str(error.value)


def test_defaults() -> None:
    config = RatioKLConfig()
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "kl_estimator": "k3",
        "use_bias_correction_kl": False,
        "epsilon_low": 0.2,
        "epsilon_high": None,
        "delta": None,
        "max_completion_length": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
        "log_ratio_limit": 20.0,
        "temperature": 1.0,
        "logit_scale": 1.0,
        "softcap": None,
        "vocab_size": None,
    }


def test_every_option_is_tried_here() -> None:
    tried = {*NUMBERS, *COUNTS, *CHOICES, "use_bias_correction_kl"}
    assert tried == {field.name for field in fields(RatioKLConfig)}


@pytest.mark.parametrize(("name", "values"), [(k, v[0]) for k, v in NUMBERS.items()])
def test_allowed_numbers(name: str, values: list) -> None:
    for value in values:
        assert getattr(RatioKLConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "values"), [(k, v[1]) for k, v in NUMBERS.items()])
def test_numbers_out_of_range(name: str, values: list) -> None:
    for value in values:
        with pytest.raises(ValueError, match="must be") as error:
            RatioKLConfig(**{name: value})
        assert_names(error, name, repr(value))


@pytest.mark.parametrize(("name", "allowed"), [(k, v[0]) for k, v in NUMBERS.items()])
def test_numbers_of_the_wrong_type(name: str, allowed: list) -> None:
    wrong = ["0.5", True, [0.5], 1j]
    for value in wrong if None in allowed else [*wrong, None]:
        with pytest.raises(TypeError, match="must be a number") as error:
            RatioKLConfig(**{name: value})
        assert_names(error, name, repr(value))


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    for value in (None, 1, 152064):
        assert getattr(RatioKLConfig(**{name: value}), name) == value
    for value in (0, -3):
        with pytest.raises(ValueError, match="must be an int > 0") as error:
            RatioKLConfig(**{name: value})
        assert_names(error, name, value)
    for value in (1.0, True, "8"):
        with pytest.raises(TypeError, match="must be an int > 0") as error:
            RatioKLConfig(**{name: value})
        assert_names(error, name, repr(value))


@pytest.mark.parametrize(("name", "values"), CHOICES.items())
def test_choices(name: str, values: tuple[str, ...]) -> None:
    for value in values:
        needed = NEEDED.get(value, {})
        assert getattr(RatioKLConfig(**{name: value}, **needed), name) == value
    for value in ("GRPO", "", "gspo"):
        with pytest.raises(ValueError, match="must be one of") as error:
            RatioKLConfig(**{name: value})
        assert_names(error, name, repr(value), *values)
    for value in (None, 1):
        with pytest.raises(TypeError, match="must be one of") as error:
            RatioKLConfig(**{name: value})
        assert_names(error, name, repr(value), *values)


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400, 3)])
def test_numbers_that_no_float_holds(value) -> None:
    with pytest.raises(ValueError, match="^quantile must fit a float; got a number beyond"):
        check_real_option("top_entropy_quantile", value, name="quantile")


def test_use_bias_correction_kl_is_a_bool() -> None:
    assert RatioKLConfig(use_bias_correction_kl=True).use_bias_correction_kl is True
    for value in (1, None, "yes"):
        with pytest.raises(TypeError, match="use_bias_correction_kl must be a bool") as error:
            RatioKLConfig(use_bias_correction_kl=value)
        assert_names(error, repr(value))


@pytest.mark.parametrize(("loss_type", "needed"), NEEDED.items())
def test_what_a_loss_type_must_name(loss_type: str, needed: dict) -> None:
    (name,) = needed
    with pytest.raises(ValueError, match=f"{name} must be named") as error:
        RatioKLConfig(loss_type=loss_type)
    assert_names(error, loss_type)
    assert RatioKLConfig(loss_type=loss_type, **needed).loss_type == loss_type


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_delta_belongs_to_the_clip_term(loss_type: str) -> None:
    options = {"loss_type": loss_type, "delta": 4.0, **NEEDED.get(loss_type, {})}
    if loss_type in ("cispo", "sapo", "vespo"):
        with pytest.raises(ValueError, match="delta") as error:
            RatioKLConfig(**options)
        assert_names(error, loss_type, 4.0)
    else:
        assert RatioKLConfig(**options).delta == 4.0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
def test_every_level_with_every_loss_type_but_vespo(loss_type: str, level: str) -> None:
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    options |= NEEDED.get(loss_type, {})
    if loss_type == "vespo" and level != "token":
        with pytest.raises(ValueError, match="importance_sampling_level") as error:
            RatioKLConfig(**options)
        assert_names(error, "vespo", repr(level))
    else:
        assert RatioKLConfig(**options).importance_sampling_level == level


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_options_that_trl_always_passes_are_accepted_everywhere(loss_type: str) -> None:
    RatioKLConfig(
        loss_type=loss_type,
        epsilon_low=0.1,
        epsilon_high=0.3,
        max_completion_length=8,
        sapo_temperature_pos=2.0,
        sapo_temperature_neg=2.0,
        vespo_k_pos=1.0,
        vespo_lambda_pos=1.0,
        vespo_k_neg=1.0,
        vespo_lambda_neg=1.0,
    )


def test_unknown_option_and_positional_argument() -> None:
    with pytest.raises(TypeError, match="epsilon"):
        RatioKLConfig(epsilon=0.2)
    with pytest.raises(TypeError, match="positional"):
        RatioKLConfig("grpo")


def test_upper_epsilon() -> None:
    assert RatioKLConfig(epsilon_low=0.1).upper_epsilon == 0.1
    assert RatioKLConfig(epsilon_low=0.1, epsilon_high=0.0).upper_epsilon == 0.0


def test_value_semantics() -> None:
    config = RatioKLConfig(loss_type="grpo", beta=0.04, vocab_size=7)
    assert config == RatioKLConfig(loss_type="grpo", beta=0.04, vocab_size=7)
    assert config != RatioKLConfig(loss_type="grpo", beta=0.04)
    assert hash(config) == hash(replace(config))
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    with pytest.raises(FrozenInstanceError):
        config.beta = 1.0
    with pytest.raises(ValueError, match="beta"):
        replace(config, beta=-1.0)

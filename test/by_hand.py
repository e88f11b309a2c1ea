"""Terms of the loss worked out by hand, for the library and for its long-hand reference alike."""

from typing import Any, NamedTuple


class PolicyCase(NamedTuple):
    """One token with log-prob log 0.5: options, ratio and advantage in; loss and slope out."""

    options: dict[str, Any]
    ratio: float
    advantage: float
    loss: float
    slope: float
    """dloss / dlogp, through the ratio and directly."""


LN2 = 0.6931471805599453

_CLIP = {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.28}
_CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
_SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}

POLICY_CASES = [
    # clip: -min(r A, clamp(r, 0.8, 1.28) A); the slope is -r A where the unclamped side wins.
    PolicyCase(_CLIP, 0.5, 2.0, -1.0, -1.0),
    PolicyCase(_CLIP, 1.1, 2.0, -2.2, -2.2),
    PolicyCase(_CLIP, 1.5, 2.0, -2.56, 0.0),
    PolicyCase(_CLIP, 0.5, -2.0, 1.6, 0.0),
    PolicyCase(_CLIP, 1.1, -2.0, 2.2, 2.2),
    PolicyCase(_CLIP, 1.5, -2.0, 3.0, 3.0),
    PolicyCase(_CLIP, 1.5, 0.0, 0.0, 0.0),
    # At the exact bound r = 1 the gradient passes.
    PolicyCase(_CLIP | {"epsilon_low": 0.0, "epsilon_high": 0.0}, 1.0, 2.0, -2.0, -2.0),
    PolicyCase(_CLIP | {"epsilon_low": 0.0, "epsilon_high": 0.0}, 1.0, -2.0, 2.0, 2.0),
    # delta caps the unclamped side: dual clip above 1.28, and below it a cap for both signs.
    PolicyCase(_CLIP | {"delta": 1.4}, 1.5, -2.0, 2.8, 0.0),
    PolicyCase(_CLIP | {"delta": 1.4}, 1.3, -2.0, 2.6, 2.6),
    PolicyCase(_CLIP | {"delta": 1.4}, 1.5, 2.0, -2.56, 0.0),
    PolicyCase(_CLIP | {"delta": 1.4}, 0.5, -2.0, 1.6, 0.0),
    PolicyCase(_CLIP | {"delta": 1.05}, 1.1, 2.0, -2.1, 0.0),
    PolicyCase(_CLIP | {"delta": 1.05}, 1.1, -2.0, 2.2, 2.2),
    PolicyCase(_CLIP | {"delta": 1.0}, 1.0, 2.0, -2.0, -2.0),
    # cispo: -min(r, 1.3) A log 0.5, slope -min(r, 1.3) A; no lower bound.
    PolicyCase(_CISPO, 0.5, 2.0, LN2, -1.0),
    PolicyCase(_CISPO, 1.0, 2.0, 2 * LN2, -2.0),
    PolicyCase(_CISPO, 2.0, 2.0, 2.6 * LN2, -2.6),
    PolicyCase(_CISPO, 0.5, -2.0, -LN2, 1.0),
    PolicyCase(_CISPO, 2.0, -2.0, -2.6 * LN2, 2.6),
    # sapo: -sigmoid(tau (r - 1)) 4 / tau A; slope -4 sigmoid (1 - sigmoid) A r.
    PolicyCase(_SAPO, 0.5, 2.0, -3.0203253503851633, -0.940014848806378),
    PolicyCase(_SAPO, 1.0, 2.0, -4.0, -2.0),
    PolicyCase(_SAPO, 2.0, 2.0, -5.848468629040039, -3.1457909318637097),
    PolicyCase(_SAPO, 0.5, -2.0, 2.831876660606733, 0.9341398232853926),
    PolicyCase(_SAPO, 1.0, -2.0, 3.8095238095238093, 2.0),
    PolicyCase(_SAPO, 2.0, -2.0, 5.64399923186403, 3.072439166781177),
    PolicyCase(_SAPO, 2.0, 0.0, 0.0, 0.0),
    # vespo with one token: w = r, phi = exp(lambda + k log w - lambda w), -phi A log 0.5.
    # A >= 0: k = 2, lambda = 3; else k = 3, lambda = 2.
    PolicyCase({"loss_type": "vespo"}, 1.0, 2.0, 2 * LN2, -2.0),
    PolicyCase({"loss_type": "vespo"}, 2.0, 2.0, 2 * 0.199148273471456 * LN2, -0.398296546942912),
    PolicyCase({"loss_type": "vespo"}, 0.5, 2.0, 2 * 1.1204222675845162 * LN2, -2.2408445351690324),
    PolicyCase({"loss_type": "vespo"}, 2.0, -2.0, -2 * 1.0826822658929016 * LN2, 2.165364531785803),
    PolicyCase({"loss_type": "vespo"}, 0.5, -2.0, -2 * 0.3397852285573806 * LN2, 0.679570457114761),
]

CLIP_BOUND_CASES = [
    # The ratio given directly, so that it hits the bound to the last bit: the gradient passes.
    PolicyCase(_CLIP, 0.8, 2.0, -1.6, -1.6),
    PolicyCase(_CLIP, 0.8, -2.0, 1.6, 1.6),
    PolicyCase(_CLIP, 1.28, 2.0, -2.56, -2.56),
    PolicyCase(_CLIP, 1.28, -2.0, 2.56, 2.56),
    PolicyCase(_CLIP | {"delta": 1.4}, 1.4, -2.0, 2.8, 2.8),
]


class KLCase(NamedTuple):
    """delta = ref_logps - logps in; the estimate and its derivative in delta out."""

    estimator: str
    limit: float | None
    delta: float
    kl: float
    slope: float


KL_CASES = [
    KLCase("k1", 20.0, 0.0, 0.0, -1.0),
    KLCase("k1", 20.0, 0.5, -0.5, -1.0),
    KLCase("k1", 20.0, -1.0, 1.0, -1.0),
    KLCase("k2", 20.0, 0.0, 0.0, 0.0),
    KLCase("k2", 20.0, 0.5, 0.125, 0.5),
    KLCase("k2", 20.0, -1.0, 0.5, -1.0),
    KLCase("k3", 20.0, 0.0, 0.0, 0.0),
    KLCase("k3", 20.0, 0.5, 0.14872127070012815, 0.6487212707001282),
    KLCase("k3", 20.0, -1.0, 0.36787944117144233, -0.6321205588285577),
    KLCase("k3", None, 0.5, 0.14872127070012815, 0.6487212707001282),
    # Beyond the limit only k3 is clamped, in both places, and then flat.
    KLCase("k1", 20.0, 30.0, -30.0, -1.0),
    KLCase("k2", 20.0, -30.0, 450.0, -30.0),
    KLCase("k3", 20.0, 30.0, 485165174.4097903, 0.0),
    KLCase("k3", 20.0, -30.0, 19.000000002061153, 0.0),
    KLCase("k3", None, 30.0, 10686474581493.463, 10686474581523.463),
    KLCase("k3", 0.5, 3.0, 0.14872127070012815, 0.0),
]


REDUCED_MASK = [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
REDUCED_TERMS = [[1.0, 0, 0], [3.0, 3.0, 6.0], [0, 0, 0]]
REDUCED = {
    "grpo": (1 / 1 + 12 / 3 + 0) / 3,
    "sapo": (1 / 1 + 12 / 3 + 0) / 3,
    "bnpo": 13 / 4,
    "dr_grpo": 13 / (3 * 5),
    "dapo": 13 / 4,
    "cispo": 13 / 4,
    "vespo": 13 / 4,
    "luspo": 13 / 3,
}
"""Loss of sequences of 1, 3 and 0 tokens with the terms above, for max_completion_length 5."""

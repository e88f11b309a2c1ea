"""The module against the oracle: loss, metrics, outputs and gradients.

In float64 to 1e-10, over every loss type x level x beta x quantile x bias x chunk size, and over
pairs of the other options; then in float32, and in bfloat16 against eager torch.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from ratio_kl.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES, RatioKLConfig
from support import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    Problem,
    assert_same,
    module,
    problem,
    relative_error,
    run,
    run_reference,
)

KINDS = [
    (loss_type, level)
    for loss_type in LOSS_TYPES
    for level in IMPORTANCE_SAMPLING_LEVELS
    if loss_type != "vespo" or level == "token"
]
# 1 byte gives the smallest tiles, 64 x 64: here 2 blocks of rows and 3 of columns, the last ones
# short. 200 kB gives whole rows at a time, and the default everything at once.
CHUNKS: list[dict[str, int]] = [{"chunk_bytes": 1}, {"chunk_bytes": 200_000}, {}]


def config_of(loss_type: str, level: str, **options: Any) -> RatioKLConfig:
    """Bounds that the problems' ratios fall on both sides of, and no number that is a float32."""
    return RatioKLConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_high=1.3 if loss_type == "cispo" else 0.28,
        max_completion_length=17,
        vespo_k_pos=1.9,
        vespo_lambda_pos=2.7,
        vespo_k_neg=2.9,
        vespo_lambda_neg=2.1,
        **options,
    )


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_grid(loss_type: str, level: str, beta: float) -> None:
    for seed, (q, bias) in enumerate(product([0.2, 0.5, 0.8, 1.0], [False, True])):
        config = config_of(loss_type, level, beta=beta, top_entropy_quantile=q)
        given = problem(seed, config, bias=bias)
        expected = run_reference(config, given)
        kept = expected.metrics["high_entropy_fraction"].item()
        assert abs(kept - q) < 0.02, "the mask must drop some tokens and not all"
        for knobs in CHUNKS:
            assert_same(run(module(config, **knobs), given), expected, FLOAT64_TOLERANCE)


# Everything else that a call or a config may say; the first value of each is the plain one.
OPTIONS: dict[str, list[Any]] = {
    "kind": KINDS,
    "kl_estimator": ["k3", "k1", "k2"],
    "use_bias_correction_kl": [False, True],
    "delta": [None, 1.2, 1.6],
    "log_ratio_limit": [20.0, None, 0.4],
    "top_entropy_quantile": [1.0, 0.3, 0.0],
    "off_policy_mask_threshold": [None, 0.1, -0.2],
    "entropy_coef": [0.0, 0.07],
    "call_entropy_coef": [None, -0.03, torch.tensor(0.05, dtype=torch.float64)],
    "logit_scale": [1.0, 0.37],
    "softcap": [None, 3.3],
    "vocab_size": [None, 131],
    "config_temperature": [1.0, 0.7],
    "temperature": [None, 1.3, "sequence", "column", "token"],
    "advantages": ["sequence", "column", "token"],
    "sampling_ratio": [None, "sequence", "column", "token"],
    "sampling_logps": [False, True],
    "old_logps": [True, False],
    "reference": ["logps", "hidden", "hidden_only"],
    "num_items_in_batch": [None, 91, torch.tensor(91)],
    "gradient_accumulation_steps": [1, 4],
    "bias": [False, True],
    "mask_dtype": [torch.bool, torch.float32, torch.int64],
    "chunk_bytes": [1, 2**28],
}


def pairwise(options: dict[str, list[Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Rows in which every two values of different options meet at least once (greedy)."""
    generator = torch.Generator().manual_seed(seed)
    names = list(options)

    def pairs(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[i + 1 :]}

    everything = {
        (a, i, b, j)
        for k, a in enumerate(names)
        for b in names[k + 1 :]
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    while everything:
        a, i, b, j = min(everything)
        candidates = []
        for _ in range(12):
            draw = {
                n: int(torch.randint(len(v), (), generator=generator)) for n, v in options.items()
            }
            candidates.append(draw | {a: i, b: j})
        best = max(candidates, key=lambda row: len(pairs(row) & everything))
        everything -= pairs(best)
        yield {name: options[name][index] for name, index in best.items()}


def build(row: dict[str, Any], seed: int) -> tuple[RatioKLConfig, Problem]:
    loss_type, level = row["kind"]
    has_delta = loss_type not in ("cispo", "sapo", "vespo")
    options = (
        "kl_estimator",
        "use_bias_correction_kl",
        "log_ratio_limit",
        "top_entropy_quantile",
        "off_policy_mask_threshold",
        "entropy_coef",
        "logit_scale",
        "softcap",
        "vocab_size",
    )
    config = config_of(
        loss_type,
        level,
        beta=0.1,
        delta=row["delta"] if has_delta else None,
        temperature=row["config_temperature"],
        **{name: row[name] for name in options},
    )
    tensor_temperature = isinstance(row["temperature"], str)
    given = problem(
        seed,
        config,
        bias=row["bias"],
        reference=row["reference"],
        advantages=row["advantages"],
        sampling_ratio=row["sampling_ratio"],
        sampling_logps=row["sampling_logps"],
        temperature=row["temperature"] if tensor_temperature else None,
    )
    if not row["old_logps"]:
        given = given.given(old_logps=None)
    if not tensor_temperature:
        given = given.given(temperature=row["temperature"])
    return config, given.given(
        entropy_coef=row["call_entropy_coef"],
        num_items_in_batch=row["num_items_in_batch"],
        gradient_accumulation_steps=row["gradient_accumulation_steps"],
    ).with_inputs(attention_mask=given.active.to(row["mask_dtype"]))


def test_every_pair_of_options() -> None:
    for seed, row in enumerate(pairwise(OPTIONS, seed=0)):
        config, given = build(row, seed)
        actual = run(module(config, chunk_bytes=row["chunk_bytes"]), given)
        expected = run_reference(config, given)
        try:
            assert_same(actual, expected, FLOAT64_TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\nwith {row}") from error


@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_float32(loss_type: str, level: str) -> None:
    # Against the oracle in float64 on the same float32 numbers. The loss of signed terms cancels,
    # so its error is measured against 1, the size of a term.
    config = config_of(loss_type, level, beta=0.04, top_entropy_quantile=0.5, entropy_coef=0.01)
    given = problem(11, config, bias=True, dtype=torch.float32)
    actual = run(module(config, chunk_bytes=1), given)
    assert actual.loss.dtype == torch.float32
    assert {grad.dtype for grad in actual.grads.values()} == {torch.float32}
    expected = run_reference(config, given.to(torch.float64))
    assert_same(actual, expected, FLOAT32_TOLERANCE, loss_size=1.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_bfloat16_is_no_worse_than_eager(loss_type: str, level: str, seed: int) -> None:
    # A width of 64 gives bfloat16 sums worth rounding. Errors of both against float64 on the same
    # bfloat16 numbers; eager torch multiplies and keeps its logits in bfloat16.
    config = config_of(loss_type, level, beta=0.04, entropy_coef=0.01)
    given = problem(seed, config, H=64, bias=True, dtype=torch.bfloat16)
    exact = run_reference(config, given.to(torch.float64))
    eager = run_reference(config, given)
    ours = run(module(config), given)
    for name, grad in exact.grads.items():
        assert ours.grads[name].dtype == torch.bfloat16
        allowed = 1.5 * relative_error(eager.grads[name], grad)
        assert relative_error(ours.grads[name], grad) <= allowed, name
    for name in ("logps", "entropies", "ratio", "kl"):
        assert ours.outputs[name].dtype == torch.float32
        wanted = exact.outputs[name]
        allowed = 1.5 * relative_error(eager.outputs[name], wanted)
        assert relative_error(ours.outputs[name], wanted) <= allowed, name


def test_entropies_against_categorical() -> None:
    config = RatioKLConfig(temperature=0.7, softcap=3.3, logit_scale=0.37)
    given = problem(6, config, bias=True, poison=False)
    logits = 0.37 * (given.hidden @ given.inputs[1].T + given.options["bias"])
    logits = 3.3 * torch.tanh(logits / 3.3) / 0.7
    for knobs in CHUNKS:
        outputs = run(module(config, **knobs), given).outputs
        exact = torch.distributions.Categorical(logits=logits)
        theirs = {"entropies": exact.entropy(), "logps": exact.log_prob(given.inputs[2])}
        for name, value in theirs.items():
            expected = torch.where(given.active, value, 0)
            assert relative_error(outputs[name], expected) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_quantile_of_one_is_bit_identical_to_leaving_it_out(loss_type: str) -> None:
    given = problem(2, config_of(loss_type, "token"), bias=True)
    named = run(module(config_of(loss_type, "token", beta=0.1, top_entropy_quantile=1.0)), given)
    left_out = run(module(config_of(loss_type, "token", beta=0.1)), given)
    assert_same(named, left_out, 0.0)


def test_shapes_of_per_sequence_arguments_do_not_matter() -> None:
    # [B], [B, 1] and the same numbers as [B, T] give the same result at every level.
    for loss_type, level in KINDS:
        if loss_type == "vespo":
            continue  # its sampling_ratio means two things: once a sequence, or once a token
        config = config_of(loss_type, level, beta=0.1)
        given = problem(4, config, sampling_ratio="sequence", poison=False)
        B, T = given.active.shape
        A, s = given.inputs[4], given.options["sampling_ratio"]
        expected = run(module(config), given)
        for shape in ((B, 1), (B, T)):
            spread = given.with_inputs(advantages=A[:, None].expand(shape))
            spread = spread.given(sampling_ratio=s[:, None].expand(shape))
            assert_same(run(module(config), spread), expected, 0.0)


def test_nothing_depends_on_what_stands_at_inactive_places() -> None:
    # trl and NeMo-RL#4120: one padded token with a silly value makes the whole loss NaN (A01).
    for loss_type, level in KINDS:
        config = config_of(loss_type, level, beta=0.1, top_entropy_quantile=0.5, entropy_coef=0.1)
        options = {"bias": True, "sampling_ratio": "token", "reference": "hidden"}
        options |= {"advantages": "token", "sampling_logps": True}
        clean = run(module(config), problem(5, config, poison=False, **options))
        spoilt = run(module(config), problem(5, config, poison=True, **options))
        assert_same(spoilt, clean, 0.0)
        inactive = ~problem(5, config, **options).active
        assert not spoilt.grads["hidden"][inactive].any()


def test_vespo_clamps_each_of_its_logarithms() -> None:
    # Log-ratios past 20 and sampling ratios below 1e-8, each made up for by the rest of the
    # sequence: without either clamp phi would be 0.
    config = config_of("vespo", "token")
    given = problem(8, config, B=2, T=3, active=3, poison=False)
    given = given.with_inputs(
        attention_mask=torch.ones(2, 3), advantages=torch.tensor([1.0, -1.0]).double()
    )
    current = run_reference(config, given).outputs["logps"]
    drift = torch.tensor([[19.0, -0.3, 0.2], [25.0, -1.0, -1.2]]).double()
    ratio = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1e-12, 1.0]]).double()
    given = given.given(old_logps=current - drift, sampling_ratio=ratio)
    expected = run_reference(config, given)
    assert (expected.outputs["phi"] > 1e-3).all()
    assert_same(run(module(config), given), expected, FLOAT64_TOLERANCE)


def test_unknown_behaviour_is_no_evidence_for_the_off_policy_mask() -> None:
    # A NaN counts as a gap of 0: 0.3, nan of mean 0.15 are kept, 0.6, nan of mean 0.3 dropped.
    config = config_of("luspo", "token", off_policy_mask_threshold=0.2)
    given = problem(9, config, B=2, T=2, active=2, poison=False, sampling_logps=True)
    ones = torch.ones(2, 2, dtype=torch.float64)
    given = given.with_inputs(attention_mask=ones, advantages=-ones[:, 0])
    current = run_reference(config, given).outputs["logps"]
    given = given.given(old_logps=current, sampling_logps=None)
    mu = current + torch.tensor([[0.3, torch.nan], [0.6, torch.nan]]).double()
    # Ratio 1: each kept token's term is 1, and two tokens of two sequences are kept.
    assert run(module(config), given.given(sampling_logps=mu)).loss.item() == 1.0


def test_off_policy_mask_without_any_behaviour_policy_keeps_everything():
    """No sampling_logps and no old_logps: even a negative threshold has nothing to hold against."""
    config = RatioKLConfig(off_policy_mask_threshold=-0.5)
    given = problem(5, config).given(old_logps=None, sampling_logps=None)
    masked, free = run(module(config), given), run(module(RatioKLConfig()), given)
    assert masked.loss.item() == free.loss.item() != 0


@pytest.mark.parametrize("name", ["hidden", "advantages"])
def test_the_off_policy_mask_hides_no_nan(name: str) -> None:
    """A NaN drift exceeds no threshold, a NaN advantage is not negative: neither is dropped."""
    config = RatioKLConfig(off_policy_mask_threshold=-100.0)
    given = problem(7, config, B=2, T=2, active=2, poison=False)
    ones = torch.ones(2, 2, dtype=torch.float64)
    given = given.with_inputs(attention_mask=ones, advantages=-ones)
    given = given.given(old_logps=-ones, sampling_logps=None)
    assert run(module(config), given).loss == 0
    position = ["hidden", "weight", "action_ids", "attention_mask", "advantages"].index(name)
    spoilt = given.inputs[position].detach().clone()
    spoilt[0, 1] = torch.nan
    given = given.with_inputs(**{name: spoilt.requires_grad_(name == "hidden")})
    assert run(module(config), given).loss.isnan()
    assert run_reference(config, given).loss.isnan()


def test_a_drift_at_the_threshold_is_kept():
    config = RatioKLConfig(off_policy_mask_threshold=0.0)
    given = problem(5, config).given(old_logps=None, sampling_logps=None)
    own = run(module(config), given).outputs["logps"]
    kept = run(module(config), given.given(sampling_logps=own))
    free = run(module(RatioKLConfig()), given)
    assert (given.inputs[4] < 0).any()
    assert kept.loss.item() == free.loss.item() != 0


def test_ref_bias_left_out_is_the_policys_bias():
    """With a reference head of its own weight too."""
    config = RatioKLConfig(beta=0.1)
    given = problem(1, config, bias=True, reference="hidden").given(ref_bias=None)
    assert_same(run(module(config), given), run_reference(config, given), FLOAT64_TOLERANCE)

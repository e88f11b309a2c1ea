"""The whole loss under torch.compile(fullgraph=True) equals eager, and seldom recompiles.

A configuration takes seconds to compile, so each test compiles few of them and covers much.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig, high_entropy_mask, linear_logprob
from support import Problem, assert_same, problem, run

# inductor, at its import, uses what newer releases of torch have deprecated themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]

# Fused kernels round in another order than eager ones.
FLOAT64, FLOAT32 = 1e-12, 1e-5


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(config: RatioKLConfig, backend: Any = "inductor", **options: Any) -> Any:
    module = FusedLinearRatioKLLoss(config, process_group="local")
    return torch.compile(module, fullgraph=True, backend=backend, **options)


def eager(config: RatioKLConfig) -> FusedLinearRatioKLLoss:
    return FusedLinearRatioKLLoss(config, process_group="local")


def pack(given: Problem) -> Problem:
    """The whole padded batch as one of sequences of 16 tokens, two of them joined, and a tail."""
    B, T = given.active.shape

    def flat(value: Any) -> Any:
        whole = isinstance(value, torch.Tensor) and value.shape[:2] == (B, T)
        return value.reshape(B * T, *value.shape[2:]) if whole else value

    offsets = torch.tensor([0, 16, 32, 32, 33, 64, 80])
    options = {name: flat(value) for name, value in given.options.items()}
    hidden, *others = (flat(x) for x in given.inputs)
    return Problem((hidden.detach().requires_grad_(), *others), options | {"cu_seqlens": offsets})


CASES = {
    "entropy mask and everything else": (
        {"loss_type": "grpo", "beta": 0.1, "top_entropy_quantile": 0.5, "entropy_coef": 0.05,
         "delta": 1.5, "off_policy_mask_threshold": 0.1, "use_bias_correction_kl": True,
         "softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3, "vocab_size": 140},
        {"bias": True, "sampling_ratio": "token", "temperature": "token", "advantages": "token",
         "sampling_logps": True, "reference": "hidden"},
        False,
        "inductor",
    ),
    "sequence level, packed": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1,
         "top_entropy_quantile": 0.5},
        {"sampling_ratio": "sequence"},
        True,
        "inductor",
    ),
    "sequence_token level, packed": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence_token", "beta": 0.1,
         "kl_estimator": "k2"},
        {},
        True,
        "aot_eager",
    ),
    "vespo": (
        {"loss_type": "vespo", "beta": 0.1}, {"sampling_ratio": "sequence"}, False, "inductor"
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {}, False, "aot_eager"),
    "sapo": ({"loss_type": "sapo"}, {}, False, "aot_eager"),
}  # fmt: skip
"""Options, shapes of the arguments, packed or not, and the compiler: inductor takes seconds."""


@pytest.mark.parametrize(
    ("options", "shapes", "packed", "backend"), CASES.values(), ids=CASES.keys()
)
def test_compiled_equals_eager(options: dict, shapes: dict, packed: bool, backend: str) -> None:
    config = RatioKLConfig(**options)
    given = problem(1, config, poison=not packed, **shapes)
    given = pack(given) if packed else given
    expected = run(eager(config), given)
    assert_same(run(compiled(config, backend), given), expected, FLOAT64, loss_size=1.0)


def test_compiled_equals_eager_in_bfloat16() -> None:
    config = RatioKLConfig(beta=0.1, entropy_coef=0.1)
    given = problem(2, config, dtype=torch.bfloat16)
    expected = run(eager(config), given)
    actual = run(compiled(config, "aot_eager"), given)
    assert actual.grads["weight"].dtype == torch.bfloat16
    assert_same(actual, expected, 2.0**-7, loss_size=1.0)


def test_every_token_masked_under_compile() -> None:
    config = RatioKLConfig(beta=0.1, top_entropy_quantile=0.5, entropy_coef=0.1)
    given = problem(3, config).with_inputs(attention_mask=torch.zeros(6, 16))
    result = run(compiled(config, backend="aot_eager"), given)
    assert result.loss == 0
    assert not any(grad.any() for grad in result.grads.values())


@pytest.mark.parametrize("dynamic", [None, True])
def test_lengths_and_numbers_do_not_recompile(dynamic: bool | None) -> None:
    """20 lengths, then 20 temperatures, coefficients and counts: a small constant of graphs."""
    config = RatioKLConfig(loss_type="dapo", beta=0.1, top_entropy_quantile=0.5)
    counter = CompileCounterWithBackend("eager")
    loss_fn = compiled(config, backend=counter, dynamic=dynamic)

    def check(given: Problem) -> None:
        expected = run(eager(config), given)
        # Values that travel as tensors are rounded as in eager: the same operations in order.
        assert_same(run(loss_fn, given), expected, FLOAT64, loss_size=1.0)

    for T in range(5, 25):
        check(problem(T, config, T=T))
    lengths = counter.frame_count
    assert lengths <= 3
    given = problem(0, config)
    for step in range(20):
        tensors = {
            "temperature": torch.full((6,), 0.5 + step / 10, dtype=torch.float64),
            "entropy_coef": torch.tensor(step / 100),
            "num_items_in_batch": torch.tensor(50 + step),
        }
        check(given.given(**tensors))
    assert counter.frame_count - lengths <= 2
    tensors_done = counter.frame_count
    for step in range(20):
        floats = {
            "temperature": 0.5 + step / 10,
            "entropy_coef": 0.01 + step / 100,
            "num_items_in_batch": 50 + step,
        }
        check(given.given(**floats))
    assert counter.frame_count - tensors_done <= 3


def test_packed_batches_do_not_recompile() -> None:
    config = RatioKLConfig(loss_type="grpo", importance_sampling_level="sequence")
    counter = CompileCounterWithBackend("eager")
    loss_fn = compiled(config, backend=counter)
    for T in range(5, 25):
        made = problem(T, config, T=T)
        B = made.active.shape[0]
        flat = [x.flatten(0, 1) if x.shape[:2] == (B, T) else x for x in made.inputs]
        flat[0] = flat[0].detach().requires_grad_()
        offsets = torch.arange(B + 1) * T
        given = Problem(tuple(flat), {"cu_seqlens": offsets})
        assert_same(run(loss_fn, given), run(eager(config), given), FLOAT64, loss_size=1.0)
    assert counter.frame_count <= 3


def test_the_primitive_and_the_mask_compile() -> None:
    def both(hidden, weight, ids, mask):
        out = linear_logprob(hidden, weight, ids, mask, return_entropy=True, temperature=0.7)
        return out.logps, out.entropies, high_entropy_mask(out.entropies, mask, 0.5, "local")

    inputs = torch.randn(3, 5, 8), torch.randn(90, 8), torch.randint(0, 90, (3, 5))
    mask = torch.rand(3, 5) > 0.4
    expected = both(*inputs, mask)
    actual = torch.compile(both, fullgraph=True, backend="aot_eager")(*inputs, mask)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=FLOAT32, atol=FLOAT32)


def test_gradients_in_forward_cannot_be_compiled() -> None:
    given = problem(4)
    loss_fn = torch.compile(
        FusedLinearRatioKLLoss(grads="forward"), backend="eager", fullgraph=True
    )
    # torch 2.8 says that something was raised, and not what.
    message = 'grads="forward" is for eager mode|Observed exception'
    with pytest.raises(RuntimeError, match=message):
        loss_fn(*given.inputs, **given.options)


# What torch itself says where a graph breaks between a leaf and its reshaped view.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_in_forward_are_right_where_a_graph_may_break() -> None:
    # Without fullgraph torch runs what it cannot trace in eager mode.
    given = problem(4)
    made = FusedLinearRatioKLLoss(grads="forward", process_group="local")
    actual = run(torch.compile(made, backend="eager"), given)
    assert_same(actual, run(made, given), FLOAT64, loss_size=1.0)


def test_errors_are_the_same_under_compile() -> None:
    config = RatioKLConfig()
    given = problem(5, config)
    loss_fn = compiled(config, backend="aot_eager")
    ids = torch.where(given.active, 150, 0)
    with pytest.raises(ValueError, match=r"action_ids must lie in \[0, 150\) on active tokens"):
        loss_fn(*given.with_inputs(action_ids=ids).inputs, **given.options)


def test_under_autocast_and_compile() -> None:
    config = RatioKLConfig(beta=0.1)
    given = problem(6, config, dtype=torch.float32)

    def with_autocast(loss_fn):
        def call(*inputs, **options):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_fn(*inputs, **options)

        return call

    expected = run(with_autocast(eager(config)), given)
    actual = run(with_autocast(compiled(config, backend="aot_eager")), given)
    assert_same(actual, expected, FLOAT32, loss_size=1.0)


# Dynamo makes an object of an autograd function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_ratio_that_overflows_under_compile() -> None:
    config = RatioKLConfig(loss_type="grpo", log_ratio_limit=None)
    given = problem(7, config, dtype=torch.float32)
    # Every ratio is inf; where A > 0 the clipped branch wins, and no gradient is left.
    given = given.given(old_logps=given.options["old_logps"] - 200)
    given = given.with_inputs(advantages=torch.ones(6))
    for loss_fn in (eager(config), compiled(config, "aot_eager")):
        result = run(loss_fn, given)
        assert result.loss.item() == pytest.approx(-1.2 * 5 / 6, rel=FLOAT32)
        assert not any(grad.any() for grad in result.grads.values())

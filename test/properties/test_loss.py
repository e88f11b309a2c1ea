"""The whole loss on random calls, against the long-hand reference in float64."""

import pytest
import torch

from properties.draws import Loss, config_of, holds, loss_call, losses
from ratio_kl import FusedLinearRatioKLLoss
from support import Problem, Result, run, run_reference

# The interpreter computes in numpy, which warns of the NaN and inf that kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_loss_agrees(actual: Result, exact: Result, given: Problem, tolerance: float) -> None:
    """Loss, metrics, outputs and gradients, relative to the sizes of the terms that cancel."""
    active = given.active
    if not active.any():
        assert actual.loss == 0
        assert not any(grad.any() for grad in actual.grads.values())
        return
    ratio = exact.outputs["ratio"][active].abs().max().item()
    kl = exact.outputs["kl"][active].abs().max().item()
    logps = exact.outputs["logps"].abs().max().item()
    size = (1 + ratio + kl) * (1 + logps) * active.sum().item()
    for name, wanted in {"loss": exact.loss, **exact.metrics}.items():
        got = actual.loss if name == "loss" else actual.metrics[name]
        off = abs(got.item() - wanted.item())
        assert off <= tolerance * size * 10, f"{name}: {got.item()} != {wanted.item()}"
    for name, wanted in exact.outputs.items():
        got = actual.outputs[name]
        if wanted is None or got is None:
            assert wanted is got, name
        elif wanted.dtype == torch.bool:
            assert torch.equal(got, wanted), name
        else:
            off = (got - wanted).abs().max().item()
            assert off <= tolerance * (1 + wanted.abs().max().item()), f"{name}: off by {off:.3g}"
    width = given.inputs[1].detach()[: int(given.inputs[1].shape[0])]
    finite = [width[width.isfinite()].abs().max().item(), given.hidden.detach()[active].abs().max()]
    for (name, wanted), other in zip(exact.grads.items(), [*finite, 1.0], strict=False):
        off = (actual.grads[name].double() - wanted).abs().max().item()
        bound = tolerance * (wanted.abs().max().item() + size * (1 + float(other)))
        assert off <= bound, f"{name}.grad: off by {off:.3g} > {bound:.3g}"
    assert not actual.grads["hidden"][~active].any()


def loss_is_right(drawn: Loss, tolerance: float, device: str = "cpu", **knobs) -> None:
    """The whole loss agrees with the reference in float64."""
    config, given = config_of(drawn), loss_call(drawn, device)
    chunk_bytes = drawn.head.chunk_bytes
    loss_fn = FusedLinearRatioKLLoss(
        config, process_group="local", chunk_bytes=chunk_bytes, **knobs
    )
    exact = run_reference(config, given.to(torch.float64, device))
    assert_loss_agrees(run(loss_fn, given), exact, given, tolerance)


def is_decided(drawn: Loss) -> bool:
    """No equal entropies, of which rounding would say which the mask keeps."""
    layouts = (drawn.head.hidden_layout, drawn.head.weight_layout)
    return drawn.config.top_entropy_quantile == 1 or "expanded" not in layouts


DECIDED = losses().filter(is_decided)


@holds(DECIDED, few=60)
def test_loss(drawn: Loss) -> None:
    loss_is_right(drawn, 1e-11)


@holds(DECIDED, few=15)
def test_loss_with_gradients_made_in_forward(drawn: Loss) -> None:
    loss_is_right(drawn, 1e-11, grads="forward")


@pytest.mark.interpreter
@holds(losses(dtypes=(torch.float32,), smooth=True), few=6)
def test_loss_on_triton(drawn: Loss) -> None:
    loss_is_right(drawn, 2e-5, backend="triton")

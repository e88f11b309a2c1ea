"""What must not change the loss, or change it in a known way; no reference is needed to say so."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from properties.draws import Loss, config_of, holds, loss_call, losses
from support import Problem, Result, module, run

EXACT = 1e-11
"""Two orders of summation in float64 of sums whose terms may be a thousand times the result."""

EITHER = ("advantages", "sampling_ratio", "temperature")
"""Arguments with one entry a token or one a sequence."""


def assert_equal(actual: Result, wanted: Result, tolerance: float = EXACT) -> None:
    """Loss and gradients agree, relative to 1 and to the largest entry."""
    off = abs(actual.loss.item() - wanted.loss.item())
    assert off <= tolerance * (1 + abs(wanted.loss.item())) * 100, f"loss: off by {off:.3g}"
    for name, grad in wanted.grads.items():
        off = (actual.grads[name].double() - grad).abs().max().item()
        assert off <= tolerance * (100 + grad.abs().max().item()), f"{name}: off by {off:.3g}"


def rows(given: Problem, index: Tensor) -> Problem:
    """The sequences `index` of a padded problem, as fresh leaves."""
    B = given.hidden.shape[0]

    def taken(value):
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != B:
            return value
        return value.detach()[index].requires_grad_(value.requires_grad)

    hidden, weight, *rest = given.inputs
    options = {
        name: value if name in ("bias", "ref_weight", "ref_bias") else taken(value)
        for name, value in given.options.items()
    }
    return Problem((taken(hidden), weight, *map(taken, rest)), options)


CALM = losses().filter(lambda d: "expanded" not in (d.head.hidden_layout, d.head.weight_layout))
"""Equal rows have equal entropies, and rounding would say which of them the mask keeps."""


@holds(CALM, few=15)
def test_the_order_of_the_sequences(drawn: Loss) -> None:
    config, given = config_of(drawn), loss_call(drawn)
    order = torch.randperm(drawn.head.B, generator=torch.Generator().manual_seed(drawn.head.seed))
    whole, permuted = run(module(config), given), run(module(config), rows(given, order))
    inverse = order.argsort()
    grads = permuted.grads | {"hidden": permuted.grads["hidden"][inverse]}
    assert_equal(replace(permuted, grads=grads), whole)
    for name, value in whole.outputs.items():
        if value is not None:
            torch.testing.assert_close(permuted.outputs[name][inverse], value, rtol=1e-9, atol=1e-9)


@holds(CALM, few=15)
def test_a_batch_in_two_micro_batches(drawn: Loss) -> None:
    """Any cut where the count spans the step; else into equally many sequences (bnpo: tokens)."""
    config = replace(config_of(drawn), top_entropy_quantile=1.0, entropy_coef=0.0)
    given = loss_call(drawn)
    B = drawn.head.B
    spans = config.loss_type in ("dapo", "cispo", "vespo")
    if spans:
        given = given.given(num_items_in_batch=int(given.active.sum()) + 1)
        cut = B // 2
    elif B % 2 or config.loss_type == "bnpo":
        return
    else:
        cut = B // 2
    steps = 1 if spans else 2
    whole = run(module(config), given.given(gradient_accumulation_steps=1))
    parts = [
        run(module(config), rows(given, index).given(gradient_accumulation_steps=steps))
        for index in (torch.arange(cut), torch.arange(cut, B))
        if len(index)
    ]
    grads = {
        name: torch.cat([part.grads[name] for part in parts])
        if name == "hidden"
        else sum(part.grads[name] for part in parts)
        for name in whole.grads
    }
    assert_equal(replace(parts[0], loss=sum(part.loss for part in parts), grads=grads), whole)


@holds(CALM, few=20)
def test_padding_and_packing(drawn: Loss) -> None:
    """Every sequence cut behind its last active token, and all of them in one row."""
    config, given = config_of(drawn), loss_call(drawn)
    B, T = given.active.shape
    position = torch.arange(1, T + 1) * given.active
    lengths = position.amax(1)
    inside = torch.arange(T) < lengths[:, None]

    def packed(name: str, value):
        if not isinstance(value, Tensor) or name in ("bias", "weight"):
            return value
        if value.shape[:2] == (B, T) and not (T == 1 and name in EITHER):
            flat = value.detach()[inside].requires_grad_(value.requires_grad)
            # [1, N]: with as many tokens as sequences [N] could be one a sequence.
            return flat.unsqueeze(0) if name in EITHER else flat
        return value.reshape(B, 1)

    names = ("hidden", "weight", "action_ids", "attention_mask", "advantages")
    inputs = tuple(packed(n, v) for n, v in zip(names, given.inputs, strict=True))
    options = {name: packed(name, value) for name, value in given.options.items()}
    options["cu_seqlens"] = torch.cat([torch.zeros(1), lengths.cumsum(0)]).long()
    padded, flat = run(module(config), given), run(module(config), Problem(inputs, options))
    grads = flat.grads | {"hidden": torch.zeros_like(padded.grads["hidden"])}
    grads["hidden"][inside] = flat.grads["hidden"]
    assert_equal(replace(flat, grads=grads), padded)
    for name, metric in padded.metrics.items():
        assert flat.metrics[name].item() == pytest.approx(metric.item(), rel=1e-9, abs=1e-9), name


@holds(st.tuples(CALM, st.sampled_from((1, 30_000, 200_000))), few=15)
def test_another_budget(drawn: tuple[Loss, int]) -> None:
    loss, chunk_bytes = drawn
    config, given = config_of(loss), loss_call(loss)
    other = run(module(config, chunk_bytes=chunk_bytes), given)
    assert_equal(other, run(module(config), given))


@holds(CALM, few=15)
def test_a_constant_added_to_all_logits(drawn: Loss) -> None:
    """Through the bias; a softcap is not blind to it."""
    config = replace(config_of(drawn), softcap=None)
    given = loss_call(drawn)
    if "bias" not in given.options:
        given = given.given(bias=torch.zeros(len(given.inputs[1]), dtype=torch.float64))
        given.options["bias"].requires_grad_()
    raised = given.given(bias=(given.options["bias"].detach() + 37.5).requires_grad_())
    assert_equal(run(module(config), raised), run(module(config), given), 100 * EXACT)


@holds(st.tuples(CALM, st.sampled_from((0.25, 2.0, 1024.0))), few=15)
def test_scaled_advantages(drawn: tuple[Loss, float]) -> None:
    """Without KL and bonus the loss is homogeneous in the advantages: exactly so by powers of 2."""
    loss, factor = drawn
    config = replace(config_of(loss), beta=0.0, entropy_coef=0.0)
    given = loss_call(loss)
    scaled = given.with_inputs(advantages=given.inputs[4] * factor)
    once, more = run(module(config), given), run(module(config), scaled)
    assert more.loss == once.loss * factor
    for name, grad in once.grads.items():
        assert torch.equal(more.grads[name], grad * factor), name


@holds(CALM, few=10)
def test_under_activation_checkpointing(drawn: Loss) -> None:
    config, given = config_of(drawn), loss_call(drawn)

    def checkpointed(*inputs: Tensor, **options):
        return checkpoint(module(config), *inputs, use_reentrant=False, **options)

    once, again = run(module(config), given), run(checkpointed, given)
    assert_equal(again, once, 0.0)


# Dynamo makes an object of an autograd function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@holds(CALM, few=3)
def test_compiled(drawn: Loss) -> None:
    """One graph, the same numbers as eager."""
    torch._dynamo.reset()
    config, given = config_of(drawn), loss_call(drawn)
    compiled = torch.compile(module(config), backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, given), run(module(config), given))

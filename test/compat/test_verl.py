"""verl's call: its signature, its values on the CPU, where its models take it, its GPU kernel."""

import ast
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from benchmark.rivals.verl import import_alone
from compat.signatures import assert_same_call
from ratio_kl import FusedLinearRatioKLLoss, linear_logprob
from ratio_kl.compat.verl import linear_cross_entropy
from support import BACKENDS, FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_close, relative_error

KERNEL = "verl.utils.kernel.linear_cross_entropy"


def verl(name):
    """A module of verl 0.9; without it, the test is skipped."""
    try:
        return import_alone(name)
    except ModuleNotFoundError as missing:
        pytest.skip(f"needs {missing.name}, which is not installed")


def head(*shape, V=300, H=16, dtype=torch.float32, device="cpu"):
    """hidden [*shape, H], weight, labels: 300 columns and 10 rows are several tiles and a tail."""
    hidden = torch.randn(*shape, H, dtype=torch.float64)
    weight = torch.randn(V, H, dtype=torch.float64)
    labels = torch.randint(V, shape, device=device)
    leaves = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return *leaves, labels


def formula(hidden, weight, labels, temperature=1.0):
    z = hidden.flatten(0, -2).double() @ weight.double().T / temperature
    p = z.softmax(-1)
    logps = z.log_softmax(-1)
    return logps.gather(-1, labels.flatten()[:, None])[:, 0], -(p * logps).sum(-1)


def gradients(outputs, leaves, weights=(0.7, -0.3)):
    """Of a sum of both outputs in which each token has a weight of its own."""
    total = sum(
        (w * torch.linspace(-1, 2, max(out.numel(), 1), device=out.device).view_as(out) * out).sum()
        for w, out in zip(weights, outputs, strict=True)
    )
    return torch.autograd.grad(total, leaves)


def test_the_signature_is_verls():
    assert_same_call(linear_cross_entropy, verl(KERNEL).LinearCrossEntropy.forward)


@pytest.mark.parametrize("shape", [(10,), (1, 10), (2, 5)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "Mean"])
def test_flat_logps_and_entropies_of_any_shape(shape, reduction):
    hidden, weight, labels = head(*shape, dtype=torch.float64)
    got = linear_cross_entropy(hidden, weight, labels, 0.7, reduction)
    logps, entropies = formula(hidden, weight, labels, 0.7)
    reduced = {"none": logps, "sum": logps.sum(), "Mean": logps.mean()}[reduction]
    assert_close(got[0], reduced, FLOAT64_TOLERANCE, "logprobs")
    assert_close(got[1], entropies, FLOAT64_TOLERANCE, "entropy")
    for mine, true in zip(
        gradients(got, (hidden, weight)),
        gradients((reduced, entropies), (hidden, weight)),
        strict=True,
    ):
        assert_close(mine, true, FLOAT64_TOLERANCE, "gradient")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 5), (10,)], ids=str)
def test_a_tensor_temperature_of_any_shape(shape):
    """[N] and [B, T] for one entry a token; one entry in whatever shape a caller holds it."""
    hidden, weight, labels = head(2, 5, dtype=torch.float64)
    temperature = torch.rand(shape, dtype=torch.float64) + 0.5
    got = linear_cross_entropy(hidden, weight, labels, temperature)
    rows = temperature.flatten().expand(10)[:, None]
    for mine, true in zip(got, formula(hidden, weight, labels, rows), strict=True):
        assert_close(mine, true, FLOAT64_TOLERANCE, "output")


def test_it_agrees_with_verls_head_in_torch():
    """`FusedLinearForPPO`, verl's other implementation of the same call, runs on the CPU."""
    function = verl("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    hidden, weight, labels = head(2, 5)
    theirs = [x.flatten() for x in function.forward(hidden, weight, labels, 0.7)]
    ours = linear_cross_entropy(hidden, weight, labels, 0.7)
    leaves = (hidden, weight)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "output")
    for mine, other in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "gradient")


def test_verls_model_forward_runs_on_it(monkeypatch):
    """The one assignment of docs/migrating.md, undone after the test."""
    pytest.importorskip("transformers")
    forward = verl("verl.models.transformers.dense_common").forward_with_triton_backend
    monkeypatch.setattr(verl(KERNEL), "linear_cross_entropy", linear_cross_entropy)
    hidden, weight, ids = head(1, 10, dtype=torch.float64)

    def body(**_):
        states = (hidden,)
        return type(
            "Out", (tuple,), dict.fromkeys(("past_key_values", "hidden_states", "attentions"))
        )(states)

    config = SimpleNamespace(output_attentions=False, output_hidden_states=False)
    model = SimpleNamespace(config=config, model=body, lm_head=SimpleNamespace(weight=weight))
    out = forward(model, input_ids=ids, return_dict=True, temperature=0.7)
    logps, entropies = formula(hidden, weight, ids.roll(-1, -1), 0.7)
    assert_close(out.log_probs, logps, FLOAT64_TOLERANCE, "log_probs")
    assert_close(out.entropy, entropies, FLOAT64_TOLERANCE, "entropy")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"reduction": "max"}, "reduction must be 'none', 'sum' or 'mean'; got 'max'"),
        ({"reduction": None}, "reduction must be .*; got None"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"labels": torch.zeros(9, dtype=torch.int64)}, "must have shape"),
        ({"labels": torch.full((10,), 300)}, "must lie in"),
        ({"hidden": torch.randn(16)}, "hidden must have shape"),
    ],
)
def test_what_it_refuses(changes, complaint):
    hidden, weight, labels = head(10)
    with pytest.raises(ValueError, match=complaint):
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "labels": labels} | changes))


def test_a_group_of_ranks_is_no_number():
    with pytest.raises(TypeError, match="dist_process_group must be None or .*; got 2 of type int"):
        linear_cross_entropy(*head(10), dist_process_group=2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under Triton's interpreter
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_compiles_as_one_graph(backend):
    hidden, weight, labels = head(1, 10)

    def call(*args):
        return linear_cross_entropy(*args, 0.7, backend=backend)

    eager = call(hidden, weight, labels)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden, weight, labels)
    for mine, other in zip(compiled, eager, strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "output")
    leaves = (hidden, weight)
    for mine, other in zip(gradients(compiled, leaves), gradients(eager, leaves), strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "gradient")


def functions(file, *names, **scope):
    """Functions of a file of verl that cannot be imported: it wants ray and a whole trainer."""
    found = PathFinder.find_spec("verl")
    if found is None:
        pytest.skip("needs verl, which is not installed")
    tree = ast.parse((Path(found.submodule_search_locations[0]) / file).read_text("utf-8"))
    tree.body = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name in names]
    assert len(tree.body) == len(names)
    for function in tree.body:
        function.decorator_list = []
    scope |= {"torch": torch, "Any": Any, "Optional": Optional}
    exec(compile(tree, file, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


class Actor(SimpleNamespace):
    """What verl's losses read of an ActorConfig."""

    def get(self, name, default):
        return getattr(self, name, default)


CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
OURS = {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 1.5}
GSPO = {"importance_sampling_level": "sequence_token", "epsilon_low": 0.2, "epsilon_high": 0.28}
SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.2, "sapo_temperature_neg": 1.4}
ACTORS = [
    ("vanilla", "token-mean", OURS | {"loss_type": "dapo"}),
    ("vanilla", "seq-mean-token-mean", OURS | {"loss_type": "grpo"}),
    ("vanilla", "seq-mean-token-sum", OURS | {"loss_type": "luspo"}),
    ("vanilla", "seq-mean-token-sum-norm", OURS | {"loss_type": "dr_grpo"}),
    ("gspo", "seq-mean-token-mean", GSPO | {"loss_type": "grpo"}),
    ("sapo", "seq-mean-token-mean", SAPO),
]

MEANS_OF_VERL = 2e-8
"""verl adds 1e-8 to a sequence's length, 2.5e-9 of the shortest here; terms are of order 1."""


@pytest.mark.parametrize(("kl", "estimator"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
@pytest.mark.parametrize(("mode", "aggregation", "options"), ACTORS)
def test_the_actors_loss_by_its_options(mode, aggregation, options, kl, estimator):
    """verl's policy loss, KL and entropy on its call, and the whole loss; ratios pass each bound.

    Three sequences of 6, 4 and 6 tokens.
    """
    masked = functions("utils/torch_functional.py", "masked_sum", "masked_mean")
    name = f"compute_policy_loss_{mode}"
    theirs = functions(
        "trainer/ppo/core_algos.py",
        *(name, "agg_loss", "kl_penalty_forward"),
        verl_F=masked,
        ActorConfig=Actor,
        AlgoConfig=type(None),
        DictConfig=dict,
    )
    batch = {"loss_scale_factor": 9} if aggregation.endswith("norm") else {}
    actor = Actor(**CLIPS, tau_pos=1.2, tau_neg=1.4, global_batch_info=batch)
    hidden, weight, labels = head(3, 6, dtype=torch.float64)
    mask = (torch.arange(6) < torch.tensor([6, 4, 6])[:, None]).double()
    advantages = torch.tensor([1.0, -1.0, -0.5]).double()
    logps, entropies = (x.view(3, 6) for x in linear_cross_entropy(hidden, weight, labels))
    old, ref = (logps.detach() + 0.5 * torch.randn(2, 3, 6)).unbind()
    weights = torch.rand(3, 6).double() + 0.5

    per_token = advantages[:, None].expand(3, 6)
    loss, _ = getattr(theirs, name)(old, logps, per_token, mask, aggregation, actor, weights)
    estimate = theirs.kl_penalty_forward(logps, ref, kl)
    loss = loss + 0.04 * theirs.agg_loss(estimate, mask, aggregation, **batch)
    loss = loss - 0.01 * theirs.agg_loss(entropies, mask, "token-mean")
    options = {"beta": 0.04, "kl_estimator": estimator, "entropy_coef": 0.01} | options
    out = FusedLinearRatioKLLoss(**options, max_completion_length=9)(
        hidden, weight, labels, mask, advantages, old, ref, sampling_ratio=weights
    )
    # The loss cancels, so it is measured against a term.
    torch.testing.assert_close(out.loss, loss, rtol=0, atol=MEANS_OF_VERL)
    leaves = [hidden, weight]
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    for actual, wanted in zip(torch.autograd.grad(out.loss, leaves), expected, strict=True):
        assert_close(actual, wanted, MEANS_OF_VERL, "gradient")


# verl's kernel needs H to be a multiple of 128; 300 tokens are no multiple of its blocks.
GPU_HEAD = {"V": 4096, "H": 256, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", [(300,), (1, 300)], ids=str)
def test_it_is_at_least_as_exact_as_verls_kernel(shape):
    """Logits of size 1, gradients in bfloat16: both are off by their roundings."""
    hidden, weight, labels = head(*shape, **GPU_HEAD)
    weight = (weight.detach() / 16).requires_grad_()
    leaves = (hidden, weight)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = formula(*wide, labels, 0.7)
    true_gradients = gradients(truth, wide)
    theirs = verl(KERNEL).linear_cross_entropy(*leaves, labels, 0.7, "none", None)
    ours = linear_cross_entropy(*leaves, labels, 0.7, "none")
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        assert mine.shape == other.shape == (300,)
        assert mine.dtype == other.dtype == torch.float32
        assert relative_error(other, true) < 1e-4
        assert relative_error(mine, true) < 2e-5
    their_gradients = gradients([out.contiguous() for out in theirs], leaves)
    for mine, other, true in zip(
        gradients(ours, leaves), their_gradients, true_gradients, strict=True
    ):
        assert mine.dtype == other.dtype == torch.bfloat16
        assert relative_error(other, true) < 5e-2
        assert relative_error(mine, true) <= 1.5 * relative_error(other, true)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a09_logits_far_below_zero():
    """verl's merge starts its maximum at 0: with all logits near -200 its sum is exp(-200) = 0."""
    hidden, weight, labels = head(300, **GPU_HEAD)
    with torch.no_grad():
        hidden.fill_(1.0)
        weight.mul_(0.001).sub_(200 / 256)
    truth = formula(hidden.detach(), weight.detach(), labels)[0]
    theirs = verl(KERNEL).linear_cross_entropy(hidden, weight, labels, 1.0, "none", None)[0]
    ours = linear_cross_entropy(hidden, weight, labels)[0]
    assert (ours - truth).abs().max() < 1e-3
    assert not (theirs - truth).abs().max() < 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_sum_does_not_start_from_memory_that_nobody_wrote():
    """verl adds its sum or mean to a torch.empty, which holds what nobody wrote."""
    hidden, weight, labels = head(300, **GPU_HEAD)
    reference = linear_logprob(hidden, weight, labels).logps.sum()
    ours = linear_cross_entropy(hidden, weight, labels, 1.0, "sum")[0]
    assert torch.equal(ours, reference)
    theirs = verl(KERNEL).linear_cross_entropy(hidden, weight, labels, 1.0, "sum")[0]
    assert not torch.isclose(theirs, reference)

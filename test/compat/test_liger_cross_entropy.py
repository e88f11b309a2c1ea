"""Liger's cross entropy of a head: nll, entropy, chosen log-probabilities, against the package."""

import pytest
import torch

from compat.signatures import assert_same_call
from ratio_kl.compat.liger import LigerFusedLinearScaledCrossEntropyFunction as Ours
from support import BACKENDS, FLOAT32_TOLERANCE, assert_close, relative_error

IGNORED = -100
CHOSEN = [7, 0, 299, 7]


def their_class():
    ops = pytest.importorskip("liger_kernel.ops", reason="needs liger-kernel")
    return ops.LigerFusedLinearScaledCrossEntropyFunction


def head(M=20, H=16, V=300, dtype=torch.float32, device="cpu"):
    """_input, weight, target with ignored rows: 300 columns are several tiles and a tail."""
    leaves = [torch.randn(M, H, device=device), torch.randn(V, H, device=device)]
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    target = torch.randint(V, (M,), device=device)
    target[::4] = IGNORED
    return *leaves, target


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients(outputs, leaves):
    """Of a sum in which each entry of each output has a weight of its own."""
    total = 0
    for scale, out in zip((1.0, -0.3, 0.5), outputs, strict=False):
        weights = torch.linspace(-1, 2, out.numel(), device=out.device).view_as(out)
        total = total + scale * (weights * out).sum()
    return torch.autograd.grad(total, leaves)


def test_the_signature_is_ligers():
    assert_same_call(Ours.apply, their_class().apply)


@pytest.mark.parametrize("chosen", [None, CHOSEN], ids=["", "chosen"])
@pytest.mark.parametrize("return_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_liger(temperature, return_entropy, chosen):
    theirs_apply = their_class().apply
    *leaves, target = head()
    ids = None if chosen is None else torch.tensor(chosen)
    given = (*leaves, target, temperature, IGNORED, 2, return_entropy, ids)
    ours, theirs = Ours.apply(*given), theirs_apply(*given)
    assert isinstance(ours, tuple) == isinstance(theirs, tuple)
    ours, theirs = as_tuple(ours), as_tuple(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, other, FLOAT32_TOLERANCE, "output")
        assert not mine[::4].any()
    for mine, other in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "gradient")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_ids_of_any_integer_dtype(dtype):
    """Of a vocabulary whose size the narrow ones cannot hold."""
    hidden, weight, target = head()
    target, chosen = target.remainder(100), torch.tensor([0, 7, 99])
    expected = Ours.apply(hidden, weight, target, ignore_index=5, selected_token_ids=chosen)
    narrow = target.to(dtype), chosen.to(dtype)
    ours = Ours.apply(hidden, weight, narrow[0], ignore_index=5, selected_token_ids=narrow[1])
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)


def test_no_chosen_log_probability_is_above_0():
    """Logits of size 80: one token of a row has all the mass, its target a logp of -100 or so."""
    hidden, weight, target = head()
    chosen = torch.arange(300)
    selected = Ours.apply(20 * hidden, weight, target, selected_token_ids=chosen)[1]
    assert (selected <= 0).all()
    assert (selected[target != IGNORED].amax(1) > -1).any()


def test_another_ignored_id_and_all_rows_ignored():
    *leaves, target = head()
    outputs = Ours.apply(*leaves, torch.full_like(target, 5), 1.0, 5, 1, True, torch.tensor(CHOSEN))
    assert not any(out.any() for out in outputs)
    assert not any(grad.any() for grad in gradients(outputs, leaves))


def test_what_stands_in_an_ignored_row_changes_nothing():
    *leaves, target = head()
    ids = torch.tensor(CHOSEN)
    clean = Ours.apply(*leaves, target, return_entropy=True, selected_token_ids=ids)
    expected = gradients(clean, leaves)
    with torch.no_grad():
        leaves[0][::4] = torch.nan
    outputs = Ours.apply(*leaves, target, return_entropy=True, selected_token_ids=ids)
    for mine, other in zip(outputs, clean, strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(gradients(outputs, leaves), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_bfloat16_logits_are_not_rounded(autocast):
    """Liger's own rounds them, and its entropies, to bfloat16: errors of 1e-2, ours of 1e-5."""
    *leaves, target = head()
    if not autocast:
        leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    ids = torch.tensor(CHOSEN)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = Ours.apply(*leaves, target, 0.7, IGNORED, 1, True, ids)
    truth = Ours.apply(
        *(leaf.detach().double() for leaf in leaves), target, 0.7, IGNORED, 1, True, ids
    )
    for mine, true in zip(ours, truth, strict=True):
        assert mine.dtype == torch.float32
        assert relative_error(mine, true) < 1e-5
    theirs = their_class().apply(*map(torch.Tensor.bfloat16, leaves), target, 0.7, IGNORED, 1, True)
    assert theirs[1].dtype == torch.bfloat16
    assert relative_error(theirs[1], truth[1]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target": torch.full((20,), 300)}, r"must lie in \[0, 300\)"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"selected_token_ids": torch.tensor([[1]])}, r"selected_token_ids must have shape \[K\]"),
        ({"selected_token_ids": torch.tensor([1, 300, -1])}, r"\[0, 300\); got 2 outside"),
        ({"selected_token_ids": torch.tensor([1.0])}, "selected_token_ids must have an integer"),
    ],
)
def test_what_it_refuses(changes, complaint):
    names = ("_input", "weight", "target")
    with pytest.raises(ValueError, match=complaint):
        Ours.apply(**(dict(zip(names, head(), strict=True)) | changes))


@pytest.mark.parametrize("value", [None, 0.5, 2**70, torch.tensor([1, 2])])
def test_an_ignored_id_that_is_none(value):
    """torch compares ids with what it knows: None ignored nothing, an int past 64 bits stopped."""
    with pytest.raises(
        (TypeError, ValueError), match="ignore_index must (be an int|fit 64 bits); got"
    ):
        Ours.apply(*head(), ignore_index=value)


def test_rows_in_batches_are_refused():
    """With as many places as hidden columns the mask of one was taken for that of the other."""
    rows, weight, target = head()
    with pytest.raises(ValueError, match=r"_input must have shape \[M, H\]; got \[2, 10, "):
        Ours.apply(
            rows.reshape(2, 10, -1),
            weight,
            target.reshape(2, 10),
            selected_token_ids=torch.tensor(CHOSEN),
        )


def test_a_temperature_a_token_is_refused():
    """Beside chosen ids it would have divided the wrong axis; Liger takes a number only, too."""
    for front in (Ours, their_class()):
        with pytest.raises(TypeError, match="temperature must be a"):
            front.apply(*head(), torch.rand(20) + 0.5, IGNORED, 1, False, torch.arange(20))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under Triton's interpreter
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_compiles_as_one_graph(backend):
    """Liger's own does not. A chosen id out of range gives NaN there: nothing can be read."""
    *leaves, target = head()

    def call(hidden, weight, target, chosen):
        return Ours.apply(hidden, weight, target, 0.7, IGNORED, 1, True, chosen, backend=backend)

    compiled_call = torch.compile(call, fullgraph=True, backend="aot_eager")
    ids = torch.tensor(CHOSEN)
    eager, compiled = (each(*leaves, target, ids) for each in (call, compiled_call))
    for mine, other in zip(compiled, eager, strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "output")
    for mine, other in zip(gradients(compiled, leaves), gradients(eager, leaves), strict=True):
        assert_close(mine, other, FLOAT32_TOLERANCE, "gradient")
    selected = compiled_call(*leaves, target, torch.tensor([7, 0, 300, 7]))[2]
    active = target != IGNORED
    assert selected[active, 2].isnan().all()
    assert torch.equal(selected[:, :2].isnan(), torch.zeros(20, 2, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("chosen", [None, CHOSEN], ids=["", "chosen"])
def test_it_is_at_least_as_exact_as_ligers_on_the_gpu(chosen):
    """On Hopper Liger runs CuTe DSL kernels, elsewhere its chunked fallback; 384 x 4096 logits."""
    apply = their_class().apply
    if torch.cuda.get_device_capability() == (9, 0):
        pytest.importorskip("cutlass", reason="Liger's Hopper kernels need nvidia-cutlass-dsl")
    hidden, weight, target = head(M=384, H=256, V=4096, dtype=torch.bfloat16, device="cuda")
    leaves = [hidden, (weight.detach() / 16).requires_grad_()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ids = None if chosen is None else torch.tensor(chosen, device="cuda")
    options = (target, 0.7, IGNORED, 1, True, ids)
    truth = Ours.apply(*wide, *options, backend="torch")
    ours, theirs = Ours.apply(*leaves, *options), apply(*leaves, *options)
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        assert mine.shape == other.shape
        assert relative_error(other, true) < 3e-2
        assert relative_error(mine, true) < 2e-5
    lists = [gradients(out, x) for out, x in ((ours, leaves), (theirs, leaves), (truth, wide))]
    for mine, other, true in zip(*lists, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(other, true) < 5e-2
        assert relative_error(mine, true) <= 1.5 * relative_error(other, true)

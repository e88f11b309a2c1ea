"""ratio_kl on logits and linear_ratio_kl: values, gradients, and what an inactive row may hold."""

import pytest
import torch
from torch import Tensor

from ratio_kl import linear_ratio_kl, ratio_kl
from ratio_kl.ops.logits_logprob import logits_ratio_kl_backward_op, logits_ratio_kl_op
from support import BACKENDS

# More tokens than one sequence, a vocabulary that is no power of two, an empty sequence.
B, T, V, H = 3, 5, 37, 6
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
JUNK = [float("nan"), float("-inf"), float("inf")]
JUNK_IDS = torch.tensor([-100, -1, V, 2**31 - 1, V + 10**6])


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """policy, ref logits [B, T, V], ids and old_logps [B, T]; ids are junk where inactive."""
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (torch.randn(B, T, V, generator=generator).to(dtype) for _ in range(2))
    ids = torch.randint(V, (B, T), generator=generator)
    ids = torch.where(MASK, ids, JUNK_IDS.expand(B, T))
    old = policy.double().log_softmax(-1).gather(-1, ids.clamp(0, V - 1)[..., None]).squeeze(-1)
    old = old + 0.3 * torch.randn(B, T, generator=generator)
    return policy, ref, ids, old


def long_hand(policy: Tensor, ref: Tensor, ids: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """The two formulas on the active rows alone, in float64; neutral values elsewhere."""
    ratio = torch.ones(MASK.shape, dtype=torch.float64)
    kl = torch.zeros(MASK.shape, dtype=torch.float64)
    rows = torch.arange(int(MASK.sum()))
    logp = policy[MASK].double().log_softmax(-1)[rows, ids[MASK]]
    delta = ref[MASK].double().log_softmax(-1)[rows, ids[MASK]] - logp
    ratio = ratio.masked_scatter(MASK, (logp - old[MASK].double()).exp())
    return ratio, kl.masked_scatter(MASK, delta.exp() - delta - 1)


def weighted(ratio: Tensor, kl: Tensor) -> Tensor:
    """A sum in which every token of both outputs has its own weight, inactive ones too."""
    weights = torch.linspace(-1, 2, B * T, dtype=torch.float64).reshape(B, T)
    return (weights * ratio).sum() + (weights.flip(0) * kl).sum()


# fp32 and half: logits of size 1 over 37 columns, so sums lose a few units in the last place.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_and_gradient(dtype):
    policy, ref, ids, old = inputs(dtype)
    policy.requires_grad_()
    ratio, kl = ratio_kl(policy, ref, ids, MASK, old)
    assert ratio.dtype == kl.dtype == (dtype if dtype == torch.float64 else torch.float32)
    expected = long_hand(policy, ref, ids, old)
    for actual, wanted in zip((ratio, kl), expected, strict=True):
        torch.testing.assert_close(
            actual.double(), wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )
    (grad,) = torch.autograd.grad(weighted(ratio, kl), policy)
    (wanted,) = torch.autograd.grad(weighted(*expected), policy)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(grad, wanted, rtol=8 * rounding, atol=max(1e-12, rounding / 8))
    assert not grad[~MASK].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_gradients(backend):
    """Of one token: of more they lie two apart, and were copied without the bit."""
    policy, ref, ids, old = (each[0, :1] for each in inputs(torch.float32))
    lazy = torch.complex(*torch.ones(2, 1)).conj().imag
    assert lazy.is_neg()
    assert lazy.is_contiguous()
    policy.requires_grad_()
    results = []
    for gradient in (lazy, lazy.resolve_neg()):
        out = ratio_kl(policy, ref, ids, MASK[0, :1], old, backend=backend)
        results += torch.autograd.grad(out, policy, [gradient, gradient])
    assert torch.equal(*results)


@pytest.mark.parametrize("junk", JUNK)
def test_inactive_rows_hold_anything(junk):
    """An inactive row of NaN or -inf gave neutral values and NaN gradients (RL-Kernel#465)."""
    policy, ref, ids, old = inputs()
    clean = policy.clone().requires_grad_()
    wanted = ratio_kl(clean, ref, ids.clamp(0, V - 1), MASK, old)
    dirty = torch.where(MASK[..., None], policy, junk).requires_grad_()
    ref = torch.where(MASK[..., None], ref, junk)
    old = torch.where(MASK, old, junk)
    found = ratio_kl(dirty, ref, ids, MASK, old)
    for actual, expected in zip(found, wanted, strict=True):
        assert torch.equal(actual, expected)
    assert (found[0][~MASK] == 1).all()
    assert (found[1][~MASK] == 0).all()
    (grad,) = torch.autograd.grad(weighted(*found), dirty)
    assert torch.equal(grad, torch.autograd.grad(weighted(*wanted), clean)[0])


@pytest.mark.parametrize("junk", JUNK[:2])
def test_nothing_of_an_inactive_row_reaches_a_shared_weight(junk):
    """hidden [6, 4] @ weight [4, 17] + junk on three rows: the weight's gradient is that of the
    active rows alone, to 2.1e-7 in float32 (RL-Kernel#465)."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 4, generator=generator)
    weight = torch.randn(4, 17, generator=generator)
    ref = torch.randn(1, 6, 17, generator=generator)
    ids = torch.randint(17, (1, 6), generator=generator)
    active = torch.tensor([[True, False, True, False, False, True]])
    padding = torch.where(active, 0.0, junk)[..., None]
    old = torch.full((1, 6), -2.5)

    shared = weight.clone().requires_grad_()
    ratio, kl = ratio_kl((hidden @ shared)[None] + padding, ref, ids, active, old)
    (ratio.sum() + kl.sum()).backward()

    alone = weight.clone().requires_grad_()
    logits = hidden[active[0]] @ alone
    picked = ids[active][:, None]
    logp = logits.gather(1, picked)[:, 0] - logits.logsumexp(1)
    d = ref[active].log_softmax(-1).gather(1, picked)[:, 0] - logp
    ((logp + 2.5).exp() + d.exp() - d - 1).sum().backward()
    assert (shared.grad - alone.grad).abs().max() <= 2.1e-7 * alone.grad.abs().max().clamp(min=1)


@pytest.mark.parametrize("junk", JUNK[:2])
def test_invalid_logits_of_an_active_row_stay_visible(junk):
    policy, ref, ids, old = inputs()
    policy[0, 1] = junk
    policy.requires_grad_()
    ratio, kl = ratio_kl(policy, ref, ids, MASK, old)
    assert ratio[0, 1].isnan()
    assert kl[0, 1].isnan()
    (grad,) = torch.autograd.grad(ratio.sum() + kl.sum(), policy)
    assert grad[0, 1].isnan().all()
    assert grad[0, 0].isfinite().all()


@pytest.mark.parametrize("bad", [-1, V, 2**40])
def test_active_ids_out_of_range_are_rejected(bad):
    policy, ref, ids, old = inputs()
    ids[0, 0] = bad
    with pytest.raises(ValueError, match=rf"action_ids must lie in \[0, {V}\).* 1 active token"):
        ratio_kl(policy, ref, ids, MASK, old)


def test_strided_logits_and_expanded_gradients():
    policy, ref, ids, old = inputs()
    longer = torch.cat([policy, policy[:, :1]], 1).requires_grad_()
    turned = ref.transpose(0, 1).contiguous().transpose(0, 1)
    ratio, kl = ratio_kl(longer[:, :-1], turned, ids, MASK, old)
    (grad,) = torch.autograd.grad(ratio.sum() + kl.sum(), longer)
    expected = policy.clone().requires_grad_()
    wanted = ratio_kl(expected, ref, ids, MASK, old)
    assert torch.equal(ratio, wanted[0])
    (wanted_grad,) = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), expected)
    assert torch.equal(grad[:, :-1], wanted_grad)
    assert not grad[:, -1].any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_empty_and_inactive_batches(shape):
    policy = torch.full((*shape, V), torch.nan).requires_grad_()
    ids, none = torch.full(shape, -1), torch.zeros(shape)
    ratio, kl = ratio_kl(policy, policy.detach(), ids, none, none)
    assert torch.equal(ratio, torch.ones(shape))
    assert torch.equal(kl, torch.zeros(shape))
    (ratio.sum() + kl.sum()).backward()
    assert torch.equal(policy.grad, torch.zeros_like(policy))


def test_only_the_policy_gets_a_gradient():
    policy, ref, ids, old = inputs()
    for constant in (ref, old):
        constant.requires_grad_()
    assert not any(x.requires_grad for x in ratio_kl(policy, ref, ids, MASK, old))
    policy.requires_grad_()
    ratio, kl = ratio_kl(policy, ref, ids, MASK, old)
    grads = torch.autograd.grad(ratio.sum() + kl.sum(), [ref, old], allow_unused=True)
    assert grads == (None, None)


def test_one_output_alone():
    policy, ref, ids, old = inputs()
    for output in (0, 1):
        leaf, exact = policy.clone().requires_grad_(), policy.clone().requires_grad_()
        ratio_kl(leaf, ref, ids, MASK, old)[output].sum().backward()
        long_hand(exact, ref, ids, old)[output].sum().backward()
        torch.testing.assert_close(leaf.grad, exact.grad, rtol=1e-12, atol=1e-12)


def test_double_backward_is_refused():
    policy, ref, ids, old = inputs()
    policy.requires_grad_()
    ratio, _ = ratio_kl(policy, ref, ids, MASK, old)
    (grad,) = torch.autograd.grad(ratio.sum(), policy, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.sum().backward()


# torch.library.opcheck looks at gradients of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# A mask that came as [T, B] gave its strides to the result, and a compiler had been told others.
@pytest.mark.parametrize("mask", [MASK, MASK.T.contiguous().T], ids=["", "transposed"])
def test_operators_are_well_behaved(mask):
    policy, ref, ids, old = inputs()
    ids = ids.clamp(0, V - 1)
    given = (policy.requires_grad_(), ref, ids, mask, old, "torch")
    torch.library.opcheck(logits_ratio_kl_op.overload, given)
    ratio, _, peak, log_sum, delta, _ = logits_ratio_kl_op(*given)
    saved = [x.detach() for x in (ratio, delta, peak, log_sum)]
    grads = (torch.ones_like(ratio).detach(), None)
    given = (policy.detach(), ids, mask, *saved, *grads, "torch")
    torch.library.opcheck(logits_ratio_kl_backward_op.overload, given)


def test_compiled_equals_eager():
    policy, ref, ids, old = inputs()
    policy.requires_grad_()
    eager = ratio_kl(policy, ref, ids, MASK, old)
    compiled = torch.compile(ratio_kl, fullgraph=True, backend="aot_eager")
    found = compiled(policy, ref, ids, MASK, old)
    for actual, wanted in zip(found, eager, strict=True):
        assert torch.equal(actual, wanted)
    grads = [torch.autograd.grad(weighted(*pair), policy)[0] for pair in (found, eager)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("reference", ["logps", "hidden", "own head"])
def test_from_hidden_states_as_from_logits(reference):
    """Where the caller holds hidden states, with a temperature of its own for each sequence."""
    _, _, ids, old = inputs()
    generator = torch.Generator().manual_seed(1)
    hidden, ref_hidden, weight, ref_weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((B, T, H), (B, T, H), (V, H), (V, H))
    )
    hidden = torch.where(MASK[..., None], hidden, torch.nan).requires_grad_()
    weight.requires_grad_()
    temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    head = weight if reference == "hidden" else ref_weight

    def logits(states: Tensor, head: Tensor) -> Tensor:
        return torch.where(MASK[..., None], states, 0) @ head.T / temperature[:, None, None]

    ref_logits = logits(ref_hidden, head).detach()
    wanted = ratio_kl(logits(hidden, weight), ref_logits, ids, MASK, old)
    picked = ids.clamp(0, V - 1)[..., None]
    given = {
        "logps": {"ref_logps": ref_logits.log_softmax(-1).gather(-1, picked).squeeze(-1)},
        "hidden": {"ref_hidden": ref_hidden},
        "own head": {"ref_hidden": ref_hidden, "ref_weight": ref_weight},
    }[reference]
    found = linear_ratio_kl(hidden, weight, ids, MASK, old, temperature=temperature, **given)
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    pairs = [torch.autograd.grad(weighted(*x), [hidden, weight]) for x in (found, wanted)]
    for actual, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    assert not pairs[0][0][~MASK].any()


def test_every_modifier_of_the_head_and_a_bias_for_both_models():
    _, _, ids, old = inputs()
    hidden, ref_hidden = torch.randn(2, B, T, H, dtype=torch.float64)
    weight, bias = torch.randn(V + 2, H, dtype=torch.float64), torch.randn(V + 2).double()

    def logits(states: Tensor) -> Tensor:
        z = (states @ weight[:V].T + bias[:V]) * 0.5
        return 3 * torch.tanh(z / 3) / 0.7

    found = linear_ratio_kl(
        hidden, weight, ids, MASK, old, ref_hidden=ref_hidden, bias=bias, temperature=0.7,
        logit_scale=0.5, softcap=3.0, vocab_size=V,
    )  # fmt: skip
    wanted = ratio_kl(logits(hidden), logits(ref_hidden), ids, MASK, old)
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_log_probs_that_require_a_gradient_get_none():
    _, _, ids, old = inputs()
    hidden, weight = torch.randn(B, T, H).double().requires_grad_(), torch.randn(V, H).double()
    leaves = torch.where(MASK, old, 0).requires_grad_(), torch.zeros(B, T).double().requires_grad_()
    found = linear_ratio_kl(hidden, weight, ids, MASK, leaves[0], ref_logps=leaves[1])
    weighted(*found).backward()
    assert hidden.grad.any()
    assert [leaf.grad for leaf in leaves] == [None, None]


def test_any_non_zero_mask_is_active():
    policy, ref, ids, old = inputs()
    wanted = ratio_kl(policy, ref, ids, MASK, old)
    for actual, expected in zip(ratio_kl(policy, ref, ids, -1.0 * MASK, old), wanted, strict=True):
        assert torch.equal(actual, expected)


def test_log_ratio_limit():
    """Off unless asked for, as the operator on logits; with it both exponents are clamped."""
    hidden, weight = torch.zeros(1, 2, H), torch.zeros(V, H)
    ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
    far = torch.tensor([[-95.0, 95.0]])
    free = linear_ratio_kl(hidden, weight, ids, mask, far, ref_logps=-far)
    assert free[0].isinf().tolist() == [[True, False]]
    assert free[1].isinf().tolist() == [[True, False]]
    ratio, kl = linear_ratio_kl(hidden, weight, ids, mask, far, ref_logps=-far, log_ratio_limit=2.0)
    torch.testing.assert_close(ratio, torch.tensor([[2.0, -2.0]]).exp(), rtol=1e-6, atol=0)
    expected = torch.tensor([[2.0, -2.0]])
    torch.testing.assert_close(kl, expected.exp() - expected - 1, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "the reference must come once, .*; got neither"),
        ({"ref_logps": 0, "ref_hidden": 0}, "the reference must come once, .*; got both"),
    ],
)
def test_the_reference_comes_once(given, match):
    hidden, weight, ids = torch.zeros(1, 2, H), torch.zeros(V, H), torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match=match):
        linear_ratio_kl(hidden, weight, ids, ids, ids.float(), **given)


@pytest.mark.parametrize(
    ("position", "value", "error", "match"),
    [
        (0, torch.zeros(B, T, V).long(), ValueError, "policy_logits must have dtype .*int64"),
        (0, torch.zeros(V), ValueError, r"policy_logits must have shape \[B, T, V\]"),
        (1, torch.zeros(B, T, V + 1), ValueError, "ref_logits must have shape"),
        (1, None, TypeError, "ref_logits must be a tensor"),
        (2, torch.zeros(B, T), ValueError, "action_ids must have an integer dtype"),
        (2, torch.zeros(B, T + 1).long(), ValueError, "action_ids must have shape"),
        (3, None, TypeError, "attention_mask must be a tensor"),
        (4, torch.zeros(B), ValueError, "old_logps must have shape"),
        (4, torch.zeros(B, T, device="meta"), ValueError, "old_logps must be on policy_logits'"),
    ],
)
def test_errors_name_the_argument(position, value, error, match):
    policy, ref, ids, old = inputs(torch.float32)
    arguments = [policy, ref, ids, MASK, old]
    arguments[position] = value
    with pytest.raises(error, match=match):
        ratio_kl(*arguments)

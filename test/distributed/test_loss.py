"""The loss over ranks: equal to one process's however the batch is cut, and never a hang.

Losses and gradients are averaged over the ranks, as DDP averages gradients. Everything is float64.
"""

from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ratio_kl import FusedLinearRatioKLLoss, RatioKLConfig
from support import FLOAT64_TOLERANCE, Problem, assert_close, problem

LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"max_completion_length": 9},
    "dapo": {"epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.3},
    "sapo": {},
    "vespo": {},
    "luspo": {},
}
TOKENS_OF_THE_STEP = ("dapo", "cispo", "vespo")
SEQUENCES = 12
"""Cut evenly over 2, 3 and 4 ranks. The last one is empty: a rank with that one alone has a
sequence and no token; a rank with a count of 0 below has no sequence."""
ANY_CUT = {
    2: [(7, 5), (12, 0), (11, 1)],
    3: [(7, 0, 5), (0, 0, 12), (2, 9, 1)],
    4: [(5, 0, 6, 1), (0, 12, 0, 0), (1, 2, 3, 6)],
}
TWO = pytest.mark.parametrize("ranks", [2], indirect=True)


def config_of(loss_type: str, **options) -> RatioKLConfig:
    return RatioKLConfig(loss_type=loss_type, beta=0.04, **LOSSES[loss_type], **options)


def batch(seed: int, config: RatioKLConfig, **sizes) -> Problem:
    """Small, because no cut into tiles matters here; 12 x 6 tokens cross every bound."""
    return problem(seed, config, **({"B": SEQUENCES, "T": 6, "H": 4, "V": 11} | sizes))


def with_lengths(seed: int, config: RatioKLConfig, lengths: list[int]) -> Problem:
    """One sequence for each length, its first tokens active."""
    given = batch(seed, config, B=len(lengths), T=max(lengths), poison=False)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return given.with_inputs(attention_mask=mask)


def part_of(given: Problem, rows: slice) -> Problem:
    """Some sequences of a problem, as leaves of their own."""

    def take(value: object) -> object:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return value.detach()[rows].requires_grad_(value.requires_grad)

    hidden, weight, *rest = given.inputs
    options = {name: take(value) for name, value in given.options.items()}
    return Problem((take(hidden), weight, *(take(value) for value in rest)), options)


def parts_of(given: Problem, counts: tuple[int, ...]) -> list[Problem]:
    """Consecutive parts of `counts` sequences."""
    edges = [0, *accumulate(counts)]
    return [part_of(given, slice(*edge)) for edge in pairwise(edges)]


def gradients(loss_fn, parts: list[Problem]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the weight, both summed over the micro-batches, and of their hiddens."""
    loss, d_weight, d_hiddens = 0, 0, []
    for part in parts:
        leaves = part.inputs[:2]
        out = loss_fn(*part.inputs, **part.options)
        d_hidden, d = torch.autograd.grad(out.loss, leaves)
        loss, d_weight = loss + out.loss.detach(), d_weight + d
        d_hiddens.append(d_hidden)
    return loss, d_weight, torch.cat(d_hiddens)


def averages_on_ranks(rank, size, cases):
    """What ranks and optimizer see of each case (loss function, micro-batches of each rank)."""
    found = []
    for loss_fn, parts in cases:
        loss, d_weight, d_hidden = gradients(loss_fn, parts[rank])
        for value in (loss, d_weight):
            dist.all_reduce(value)
        found.append((loss / size, d_weight / size, d_hidden / size))
    return found


def assert_as_one_process(ranks, cases):
    """Each case is (name, loss function, the whole problem, micro-batches of each rank)."""
    of_ranks = ranks.run(averages_on_ranks, [(loss_fn, parts) for _, loss_fn, _, parts in cases])
    for (name, loss_fn, given, _), *found in zip(cases, *of_ranks, strict=True):
        loss, d_weight, d_hidden = gradients(loss_fn, [given])
        for rank, (got_loss, got_weight, _) in enumerate(found):
            assert_close(got_loss, loss, FLOAT64_TOLERANCE, f"{name}, rank {rank}: loss")
            assert_close(got_weight, d_weight, FLOAT64_TOLERANCE, f"{name}: weight.grad")
        hidden = torch.cat([got_hidden for _, _, got_hidden in found])
        assert_close(hidden, d_hidden, FLOAT64_TOLERANCE, f"{name}: hidden.grad")


def one_call_each(given: Problem, counts: tuple[int, ...]) -> list[list[Problem]]:
    return [[part] for part in parts_of(given, counts)]


# The cuts that change nothing


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_losses_over_the_tokens_of_the_step_take_any_cut(ranks, grads):
    """Uneven ranks, ranks without an active token and ranks without a sequence among them."""
    cases = []
    variants = [(loss_type, "token") for loss_type in TOKENS_OF_THE_STEP] + [("dapo", "sequence")]
    for seed, (loss_type, level) in enumerate(variants):
        for q in (1.0, 0.5):
            config = config_of(loss_type, top_entropy_quantile=q, importance_sampling_level=level)
            given = batch(seed, config)
            items = given.active.sum()
            # A number, a tensor, and a count of a step that spans more than this call.
            for count in (None, items.item(), items, 3.0 * items.item()):
                counted = given.given(num_items_in_batch=count)
                for counts in ANY_CUT[ranks.size]:
                    name = f"{loss_type}, {level}, q={q}, items={count}, {counts}"
                    loss_fn = FusedLinearRatioKLLoss(config, grads=grads)
                    cases.append((name, loss_fn, counted, one_call_each(counted, counts)))
    assert_as_one_process(ranks, cases)


def test_losses_over_the_sequences_take_cuts_into_equally_many(ranks):
    """Their token counts differ; in one case a whole rank has none."""
    cases = []
    counts = ranks.size * (SEQUENCES // ranks.size,)
    for seed, loss_type in enumerate(("grpo", "sapo", "dr_grpo", "luspo")):
        for q in (1.0, 0.5):
            config = config_of(loss_type, top_entropy_quantile=q)
            given = batch(seed, config)
            emptied = given.inputs[3].clone()
            emptied[: counts[0]] = 0
            for name, whole in (
                ("as drawn", given),
                ("first rank without a token", given.with_inputs(attention_mask=emptied)),
            ):
                loss_fn = FusedLinearRatioKLLoss(config)
                cases.append(
                    (f"{loss_type}, q={q}, {name}", loss_fn, whole, one_call_each(whole, counts))
                )
    assert_as_one_process(ranks, cases)


def test_means_over_a_call_take_cuts_into_equally_many_tokens(ranks):
    """bnpo and the entropy bonus: each rank has one short sequence and one long one."""
    cases = []
    for seed, (loss_type, coefficient) in enumerate(
        [("bnpo", 0.0), ("bnpo", 0.1), ("dapo", 0.1), ("grpo", 0.1), ("luspo", -0.1)]
    ):
        config = config_of(loss_type, entropy_coef=coefficient)
        given = with_lengths(seed, config, ranks.size * [2, 7])
        loss_fn = FusedLinearRatioKLLoss(config)
        name = f"{loss_type}, entropy_coef={coefficient}"
        cases.append((name, loss_fn, given, one_call_each(given, ranks.size * (2,))))
    config = config_of("bnpo", top_entropy_quantile=0.5)
    given = with_lengths(9, config, ranks.size * [2, 7])
    loss_fn = FusedLinearRatioKLLoss(config)
    cases.append(("bnpo, q=0.5", loss_fn, given, one_call_each(given, ranks.size * (2,))))
    assert_as_one_process(ranks, cases)


@TWO
def test_a23_accumulation_divides_once(ranks):
    """Sums divided by the step's token count and by the steps again (huggingface/trl#5619).

    Lengths 1 to 8, 36 tokens, on two ranks in one, two and four micro-batches each.
    """
    lengths, cases = list(range(1, 9)), []
    for seed, loss_type in enumerate((*TOKENS_OF_THE_STEP, "grpo", "sapo", "dr_grpo", "luspo")):
        config = config_of(loss_type)
        given = with_lengths(seed, config, lengths).given(num_items_in_batch=36)
        for steps in (1, 2, 4):
            micro = parts_of(
                given.given(gradient_accumulation_steps=steps), 2 * steps * (4 // steps,)
            )
            parts = [micro[:steps], micro[steps:]]
            name = f"{loss_type}, {steps} micro-batches"
            cases.append((name, FusedLinearRatioKLLoss(config), given, parts))
    assert_as_one_process(ranks, cases)


@TWO
def test_without_the_steps_count_accumulation_divides_by_the_steps(ranks):
    """Two micro-batches with equally many tokens over both ranks, cut unevenly between them."""
    config = config_of("dapo")
    given = with_lengths(0, config, [1, 6, 2, 5])
    parts = [[], []]
    for half in parts_of(given, (2, 2)):
        mine = parts_of(half.given(gradient_accumulation_steps=2), (1, 1))
        for rank, part in enumerate(mine):
            parts[rank].append(part)
    # The order in which the ranks hold the sequences.
    whole = part_of(given, torch.tensor([0, 2, 1, 3]))
    loss_fn = FusedLinearRatioKLLoss(config)
    assert_as_one_process(ranks, [("dapo", loss_fn, whole, parts)])


# Which ranks take part


class Collectives(TorchDispatchMode):
    """Records the collectives, whichever of torch's two families: (name, shape sent, dtype)."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        family, name = str(function).split(".")[:2]
        if family in ("_c10d_functional", "c10d") and name != "wait_tensor":
            tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            self.sent += [(name, tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        return function(*args, **(kwargs or {}))


def local_on_ranks(rank, size, config, parts):
    with Collectives() as record:
        found = gradients(FusedLinearRatioKLLoss(config, process_group="local"), [parts[rank]])
    return record.sent, found


def test_local_communicates_nothing(ranks):
    """Each rank has its own threshold and denominators, as if it were alone."""
    config = config_of("dapo", top_entropy_quantile=0.5, entropy_coef=0.1)
    given = batch(0, config)
    counts = ANY_CUT[ranks.size][-1]
    parts = parts_of(given, counts)
    for part, (sent, found) in zip(parts, ranks.run(local_on_ranks, config, parts), strict=True):
        assert sent == []
        alone = gradients(FusedLinearRatioKLLoss(config), [part])
        for got, wanted, what in zip(found, alone, ("loss", "weight", "hidden"), strict=True):
            assert_close(got, wanted, FLOAT64_TOLERANCE, what)


@TWO
def test_a_threshold_per_rank_would_differ(ranks):
    """Else the cuts above would say nothing about whose quantile is taken."""
    config = config_of("dapo", top_entropy_quantile=0.5)
    given = batch(0, config).given(num_items_in_batch=54)
    parts = parts_of(given, (7, 5))
    of_ranks = ranks.run(local_on_ranks, config, parts)
    per_rank = sum(loss.item() for _, (loss, _, _) in of_ranks)
    whole = gradients(FusedLinearRatioKLLoss(config), [given])[0].item()
    assert abs(per_rank - whole) > 1e-3 * abs(whole)


def averages_on_pairs(rank, size, config, parts):
    """Ranks 0 and 1 share a batch, ranks 2 and 3 another; what a pair averages."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    loss_fn = FusedLinearRatioKLLoss(config, process_group=mine)
    loss, d_weight, _ = gradients(loss_fn, [parts[rank]])
    for value in (loss, d_weight):
        dist.all_reduce(value, group=mine)
    return loss / 2, d_weight / 2


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_an_explicit_group_shares_nothing_with_the_others(ranks):
    config = config_of("dapo", top_entropy_quantile=0.5)
    batches = [batch(seed, config) for seed in (1, 2)]
    parts = [*parts_of(batches[0], (7, 5)), *parts_of(batches[1], (1, 11))]
    for rank, found in enumerate(ranks.run(averages_on_pairs, config, parts)):
        alone = gradients(FusedLinearRatioKLLoss(config), [batches[rank // 2]])
        for got, wanted, what in zip(found, alone, ("loss", "weight.grad"), strict=False):
            assert_close(got, wanted, FLOAT64_TOLERANCE, f"rank {rank}: {what}")


# What a call sends

UNALIKE = ("no gradient wanted", "no active token", "no sequence", "frozen weight")


def sent_on_ranks(rank, size, cases, unalike):
    """What each case sends, forward and backward, where every rank is unlike the others."""
    kind, found = unalike[rank], []
    for loss_fn, given in cases:
        if kind == "no sequence":
            given = part_of(given, slice(0, 0))
        hidden, weight, ids, mask, advantages = given.inputs
        if kind == "no active token":
            mask = torch.zeros_like(mask)
        weight = weight.detach().requires_grad_(kind != "frozen weight")
        with Collectives() as forward, torch.set_grad_enabled(kind != "no gradient wanted"):
            loss = loss_fn(hidden, weight, ids, mask, advantages, **given.options).loss
        with Collectives() as backward:
            if loss.requires_grad:
                loss.backward()
        found.append((forward.sent, backward.sent))
    return found


@pytest.mark.parametrize("grads", ["backward", "forward"])
def test_every_rank_sends_the_same(ranks, grads):
    """A35: a rank with nothing to add returned before the others' gather (huggingface/trl#3933)."""
    names, cases = [], []
    for loss_type in LOSSES:
        for q in (1.0, 0.5):
            for items in (None, 54):
                config = config_of(loss_type, top_entropy_quantile=q, entropy_coef=0.1)
                given = batch(3, config).given(num_items_in_batch=items)
                counts = items is None and loss_type in TOKENS_OF_THE_STEP
                names.append((f"{loss_type}, q={q}, items={items}", q != 1 or counts))
                cases.append((FusedLinearRatioKLLoss(config, grads=grads), given))
    unalike = UNALIKE[-ranks.size :]
    found = ranks.run(sent_on_ranks, cases, unalike)
    for (name, communicates), *of_ranks in zip(names, *found, strict=True):
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks), name
        forward, backward = of_ranks[0]
        assert backward == [], name
        assert bool(forward) == communicates, name


def calls_on_ranks(rank, size, cases):
    """What each case sends."""
    found = []
    for loss_fn, parts in cases:
        with Collectives() as record:
            loss_fn(*parts[rank].inputs, **parts[rank].options)
        found.append(record.sent)
    return found


def test_what_a_call_sends(ranks):
    """The table of docs/distributed.md."""
    cases = []
    for loss_type, q, items in (
        ("dapo", 1.0, None),
        ("dapo", 1.0, 54),
        ("grpo", 1.0, None),
        ("dapo", 0.5, None),
        ("dapo", 0.5, 54),
        ("grpo", 0.5, None),
    ):
        config = config_of(loss_type, top_entropy_quantile=q)
        given = with_lengths(0, config, ranks.size * [1, 2]).given(num_items_in_batch=items)
        parts = parts_of(given, ranks.size * (2,))
        cases.append((FusedLinearRatioKLLoss(config), parts))
    counts = [("all_reduce", (8,), "torch.int64")]
    quantile = [
        ("all_gather_into_tensor", (1,), "torch.int64"),
        ("all_gather_into_tensor", (3,), "torch.float64"),
    ]
    for found in ranks.run(calls_on_ranks, cases):
        assert found == [counts, [], [], *3 * [counts + quantile]]


# Values that no rank may overlook


def losses_on_ranks(rank, size, config, parts):
    part = parts[rank]
    return FusedLinearRatioKLLoss(config)(*part.inputs, **part.options).loss.item()


def test_a_nan_entropy_on_one_rank_shows_on_every_rank(ranks):
    config = config_of("dapo", top_entropy_quantile=0.5)
    given = with_lengths(0, config, ranks.size * [3])
    assert (
        not torch.tensor(ranks.run(losses_on_ranks, config, parts_of(given, ranks.size * (1,))))
        .isnan()
        .any()
    )
    hidden = given.hidden.detach().clone()
    hidden[-1, 1] = torch.nan
    parts = parts_of(given.with_inputs(hidden=hidden), ranks.size * (1,))
    assert torch.tensor(ranks.run(losses_on_ranks, config, parts)).isnan().all()


def errors_on_ranks(rank, size, loss_fn, part_of_rank):
    """The error of each rank, and whether the ranks are still in step after it."""
    part = part_of_rank[rank]
    try:
        loss_fn(*part.inputs, **part.options)
    except ValueError as error:
        message = str(error)
    else:
        message = None
    count = torch.ones(())
    dist.all_reduce(count)
    return message, count.item() == size


def compiled_errors_on_ranks(rank, size, config, part_of_rank):
    loss_fn = FusedLinearRatioKLLoss(config)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    found = errors_on_ranks(rank, size, compiled, part_of_rank)
    torch._dynamo.reset()
    return found


def bad_id(part: Problem) -> Problem:
    ids = part.inputs[2].clone()
    ids[0, 1] = 11
    return part.with_inputs(action_ids=ids)


def bad_temperature(part: Problem) -> Problem:
    temperature = torch.ones(part.inputs[2].shape, dtype=torch.float64)
    temperature[0, 1] = -1
    return part.given(temperature=temperature)


def packed(part: Problem, offsets: list[int]) -> Problem:
    """The same tokens as packed sequences of [N]."""
    hidden, weight, *rest = part.inputs
    options = {name: value.flatten() for name, value in part.options.items()}
    lengths = hidden.shape[0] * [hidden.shape[1]]
    rest[-1] = rest[-1].repeat_interleave(torch.tensor(lengths))
    inputs = (hidden.flatten(0, 1), weight, *(value.flatten() for value in rest))
    return Problem(inputs, options | {"cu_seqlens": torch.tensor(offsets)})


EXCHANGES = pytest.mark.parametrize(
    ("loss_type", "q", "items"),
    [("dapo", 1.0, None), ("dapo", 0.5, None), ("dapo", 0.5, 54), ("grpo", 0.5, None)],
    ids=["count", "count and quantile", "quantile", "quantile of grpo"],
)
BAD_VALUES = pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (bad_id, "action_ids must lie in [0, 11) on active tokens; got 1 active token"),
        (bad_temperature, "temperature must be > 0 and finite on active tokens; got 1 value"),
    ],
    ids=["id", "temperature"],
)


def one_bad_rank(ranks, config: RatioKLConfig, items: int | None, spoil) -> list[Problem]:
    given = with_lengths(0, config, ranks.size * [3]).given(num_items_in_batch=items)
    *parts, last = parts_of(given, ranks.size * (1,))
    return [*parts, spoil(last)]


@EXCHANGES
@pytest.mark.parametrize("grads", ["backward", "forward"])
@BAD_VALUES
def test_a_bad_value_on_one_rank_raises_on_every_rank(
    ranks, spoil, message, grads, loss_type, q, items
):
    config = config_of(loss_type, top_entropy_quantile=q)
    parts = one_bad_rank(ranks, config, items, spoil)
    loss_fn = FusedLinearRatioKLLoss(config, grads=grads)
    for error, in_step in ranks.run(errors_on_ranks, loss_fn, parts):
        assert message in str(error)
        assert in_step


@TWO
@EXCHANGES
@BAD_VALUES
def test_compiled_too(ranks, spoil, message, loss_type, q, items):
    """A check whose result nothing reads is dead code to a compiler."""
    config = config_of(loss_type, top_entropy_quantile=q)
    parts = one_bad_rank(ranks, config, items, spoil)
    for error, in_step in ranks.run(compiled_errors_on_ranks, config, parts):
        assert message in str(error)
        assert in_step


@EXCHANGES
def test_bad_offsets_on_one_rank_raise_on_every_rank(ranks, loss_type, q, items):
    config = config_of(loss_type, top_entropy_quantile=q)
    given = with_lengths(0, config, 2 * ranks.size * [3])
    parts = [packed(part, [0, 3, 6]) for part in parts_of(given, ranks.size * (2,))]
    parts[-1] = parts[-1].given(cu_seqlens=torch.tensor([0, 7, 6]))
    parts = [part.given(num_items_in_batch=items) for part in parts]
    for error, in_step in ranks.run(errors_on_ranks, FusedLinearRatioKLLoss(config), parts):
        assert "cu_seqlens" in str(error)
        assert in_step


@TWO
def test_local_raises_where_the_bad_id_is(ranks):
    config = config_of("dapo")
    parts = parts_of(with_lengths(0, config, [3, 3]), (1, 1))
    parts[1] = bad_id(parts[1])
    loss_fn = FusedLinearRatioKLLoss(config, process_group="local")
    (first, _), (second, _) = ranks.run(errors_on_ranks, loss_fn, parts)
    assert first is None
    assert "action_ids" in second


# torch.compile


def compiled_on_ranks(rank, size, cases):
    """Loss and gradients of each case, eager and compiled."""
    found = []
    for config, parts in cases:
        loss_fn = FusedLinearRatioKLLoss(config)
        compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
        found.append((gradients(loss_fn, [parts[rank]]), gradients(compiled, [parts[rank]])))
        torch._dynamo.reset()
    return found


@TWO
def test_compiles_in_one_graph_over_ranks(ranks):
    """With both exchanges, with each alone, and a rank whose only sequence is empty."""
    cases = []
    for loss_type, q, items in (("dapo", 0.5, None), ("grpo", 1.0, None), ("dapo", 0.5, 54)):
        config = config_of(loss_type, top_entropy_quantile=q)
        given = batch(0, config).given(num_items_in_batch=items)
        cases.append((config, parts_of(given, (11, 1))))
    for of_rank in ranks.run(compiled_on_ranks, cases):
        for eager, compiled in of_rank:
            for got, wanted, what in zip(
                compiled, eager, ("loss", "weight", "hidden"), strict=True
            ):
                assert_close(got, wanted, FLOAT64_TOLERANCE, what)

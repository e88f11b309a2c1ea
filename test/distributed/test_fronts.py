"""The fronts over ranks: heads cut as verl and RL-Kernel cut them, counts as Liger counts them."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from ratio_kl.compat.rl_kernel import linear_logp
from ratio_kl.compat.verl import linear_cross_entropy
from support import FLOAT64_TOLERANCE, assert_close, relative_error

TWO = pytest.mark.parametrize("ranks", [2], indirect=True)


def whole_head(V):
    """hidden [1, 6, 4], weight [V, 4], bias [V], ids [1, 6], weights of the tokens: on every rank
    the same. Small: what is tested is which rank holds what."""
    generator = torch.Generator().manual_seed(V)
    hidden, weight, bias, scale = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((1, 6, 4), (V, 4), (V,), (6,))
    )
    ids = torch.randint(V, (1, 6), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), ids, scale


def own(whole, rows, rank):
    start = sum(rows[:rank])
    return whole[start : start + rows[rank]].detach().requires_grad_()


def check_verl(rank, size):
    hidden, weight, _, ids, scale = whole_head(10 * size)
    shard = own(weight, [10] * size, rank)
    ours = linear_cross_entropy(hidden, shard, ids, 0.7, "none", dist.group.WORLD)
    whole = linear_cross_entropy(hidden, weight, ids, 0.7)
    for mine, other in zip(ours, whole, strict=True):
        assert_close(mine, other, FLOAT64_TOLERANCE, "output")

    def loss(logprobs, entropy):
        return (scale * logprobs).sum() + 0.3 * (scale * entropy).sum()

    d_hidden, d_shard = torch.autograd.grad(loss(*ours), (hidden, shard))
    true_hidden, true_weight = torch.autograd.grad(loss(*whole), (hidden, weight))
    assert relative_error(d_hidden, true_hidden) > 0.1, "a rank's own part, and not the sum"
    dist.all_reduce(d_hidden)
    assert_close(d_hidden, true_hidden, FLOAT64_TOLERANCE, "hidden.grad")
    own_rows = true_weight[10 * rank : 10 * rank + 10]
    assert_close(d_shard, own_rows, FLOAT64_TOLERANCE, "weight.grad")
    total = linear_cross_entropy(hidden, shard, ids, 0.7, "sum", dist.group.WORLD)[0]
    assert_close(total, whole[0].sum(), FLOAT64_TOLERANCE, "sum")
    for bad in (torch.tensor(1.0), shard[:, :3]):
        with pytest.raises(ValueError, match="weight must have shape"):
            linear_cross_entropy(hidden, bad, ids, 0.7, "none", dist.group.WORLD)


def check_rl_kernel(rank, size, rows):
    hidden, weight, bias, ids, scale = whole_head(sum(rows))
    shard, own_bias = own(weight, rows, rank), own(bias, rows, rank)
    whole = linear_logp(hidden, weight, ids, bias)
    true = torch.autograd.grad((scale * whole).sum(), (hidden, weight, bias))
    start = list(accumulate(rows, initial=0))[rank]
    for global_vocab_size in (None, sum(rows)):
        ours = linear_logp(
            hidden,
            shard,
            ids,
            own_bias,
            tp_group=dist.group.WORLD,
            vocab_start_index=start,
            global_vocab_size=global_vocab_size,
        )
        assert_close(ours, whole, FLOAT64_TOLERANCE, "logp")
        grads = torch.autograd.grad((scale * ours).sum(), (hidden, shard, own_bias))
        places = (slice(None), *[slice(start, start + rows[rank])] * 2)
        for mine, other, place in zip(grads, true, places, strict=True):
            assert_close(mine, other[place], FLOAT64_TOLERANCE, "gradient")


def check_rl_kernel_refuses(rank, size, start_of_rank, global_vocab_size, complaint):
    """On every rank, so that none waits for another. No other test has shards of 7 rows."""
    hidden, weight, _, ids, _ = whole_head(7 * size)
    with pytest.raises(ValueError, match=complaint):
        linear_logp(
            hidden,
            own(weight, [7] * size, rank),
            ids,
            tp_group=dist.group.WORLD,
            vocab_start_index=start_of_rank[rank],
            global_vocab_size=global_vocab_size,
        )


def check_liger(rank, size):
    """Each rank has sequences and a number of tokens of its own.

    In one chunk: Liger makes a collective for each, so ranks with other numbers of them would hang.
    """
    from compat.liger_cases import Batch, their_loss
    from ratio_kl.compat.liger import LigerFusedLinearGRPOLoss

    torch.manual_seed(rank)
    batch = Batch(B=2 + rank)
    call = {"old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref}
    for loss_type, items in (("dapo", None), ("dapo", 57), ("cispo", None), ("grpo", None)):
        ours, theirs = (
            make(loss_type=loss_type, chunk_size=9)(
                *batch.required, **call, num_items_in_batch=items
            )[0]
            for make in (LigerFusedLinearGRPOLoss, their_loss)
        )
        grads = [torch.autograd.grad(loss, batch.hidden)[0] for loss in (ours, theirs)]
        # float32, in another order.
        assert relative_error(*grads) < 2e-5
        assert abs(ours - theirs) < 2e-5


@TWO
def test_verls_head_cut_over_ranks(ranks):
    ranks.run(check_verl)


@TWO
@pytest.mark.parametrize("rows", [[10, 10], [3, 8]], ids=str)
def test_rl_kernels_head_cut_over_ranks(ranks, rows):
    ranks.run(check_rl_kernel, rows)


@TWO
@pytest.mark.parametrize(
    ("start_of_rank", "global_vocab_size", "complaint"),
    [
        ([0, 0], None, r"the ranks before, .*: \[0, 7\]; got \[0, 0\]"),
        ([7, 0], 14, r"the ranks before, .*: \[0, 7\]; got \[7, 0\]"),
        ([0, 7], 16, "global_vocab_size must be the rows of the whole head, 14; got 16"),
    ],
)
def test_shards_that_do_not_fit_are_refused_on_every_rank(
    ranks, start_of_rank, global_vocab_size, complaint
):
    ranks.run(check_rl_kernel_refuses, start_of_rank, global_vocab_size, complaint)


@TWO
def test_liger_counts_the_tokens_of_all_ranks(ranks):
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    ranks.run(check_liger)

"""The fronts under FSDP2 and DDP, over real processes: the step of one process, to rounding."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs the package transformers (extra transformers)")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from compat.tiny import V, assert_near, llama
from ratio_kl import FusedLinearRatioKLLoss
from ratio_kl.compat.transformers import fused_head

TWO = pytest.mark.parametrize("ranks", [2], indirect=True)


def batch(rank=None):
    """Four sequences, of which a rank holds two."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (4, 7), generator=generator)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    advantages = torch.randn(4, generator=generator)
    every = ids, mask, advantages
    return every if rank is None else tuple(x[2 * rank : 2 * rank + 2] for x in every)


def loss(model, loss_fn, ids, mask, advantages):
    out = model(
        input_ids=ids,
        from_hidden=lambda hidden, head: head.loss(
            loss_fn, hidden[:, :-1], ids[:, 1:], mask, advantages
        ),
    )
    return out.loss


def shard(model, how):
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if how == "fsdp, head apart":
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_step(rank, size, how, tied):
    loss_fn = FusedLinearRatioKLLoss(top_entropy_quantile=0.6)
    alone = llama(tie_word_embeddings=tied)
    together = copy.deepcopy(alone)
    fused_head(alone)
    expected = loss(alone, FusedLinearRatioKLLoss(loss_fn.config, process_group="local"), *batch())
    expected.backward()
    fused_head(together)
    together = shard(together, how)
    loss(together, loss_fn, *batch(rank)).backward()
    reference = dict(alone.named_parameters())
    for name, parameter in together.named_parameters():
        name = name.removeprefix("module.")
        assert_near(whole(parameter.grad), reference[name].grad, name)


@TWO
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_step_over_ranks(ranks, how, tied):
    ranks.run(check_step, how, tied)


@TWO
def test_a_head_that_fsdp_shards_apart(ranks):
    """Its weight is gathered by hooks of its own, so the head must be called."""
    ranks.run(check_step, "fsdp, head apart", False)

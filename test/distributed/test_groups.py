"""Which ranks a call communicates with, and sums over them."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from ratio_kl.distributed.groups import resolve, sum_over, world_size

WITHOUT_DISTRIBUTED = """
import torch
import torch._dynamo  # torch's own lazy imports, which such a build words differently
import torch.distributed as dist

# What such a build has: a stub of ProcessGroup, and none of the functions.
dist.is_available = lambda: False
dist.ProcessGroup = type("ProcessGroup", (), {})
for name in ("group", "is_initialized", "init_process_group", "get_world_size", "all_reduce"):
    delattr(dist, name)

from ratio_kl.distributed.groups import resolve
from ratio_kl.distributed.quantile import masked_quantile

assert resolve() is None and resolve("local") is None
values = torch.tensor([1.0, 2.0, 9.0])
assert masked_quantile(values, values < 5, 0.5, resolve()) == 1.5
try:
    resolve(object())
except TypeError as error:
    assert "process_group" in str(error)
else:
    raise AssertionError("an object was accepted")
"""

ENDED = """
import ratio_kl
import weakref
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
import torch._dynamo  # as the first compiled call does, and the first call of a custom operator
dist.destroy_process_group()
assert group() is None, "held, its threads with it"
"""


def test_a_group_that_was_destroyed_is_gone():
    """Else gloo's threads are there when the process ends, and may abort it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ENDED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_without_an_initialised_default_group_nothing_is_communicated():
    assert not dist.is_initialized()
    assert resolve() is None
    assert resolve("local") is None
    assert world_size(None) == 1
    tensor = torch.ones(3)
    assert sum_over(tensor, None) is tensor


@pytest.mark.parametrize("wrong", ["world", 0, -100, [0, 1], object])
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError, match=r"process_group must be None.*'local'.*got"):
        resolve(wrong)


def test_a_build_without_distributed_works():
    """A fresh process: the names are gone before the library is imported."""
    subprocess.run(
        [sys.executable, "-c", WITHOUT_DISTRIBUTED],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def resolve_on_ranks(rank, size):
    default, local = resolve(), resolve("local")
    explicit = dist.new_group(list(range(size)))
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([member]) for member in range(size)][rank]
    try:
        pair_size = world_size(resolve(pair))
    except TypeError:
        pair_size = "refused"
    return default, local, world_size(resolve(explicit)), pair_size, resolve(alone)


def test_default_explicit_and_single_groups(ranks):
    for rank, found in enumerate(ranks.run(resolve_on_ranks)):
        default, local, explicit_size, pair_size, alone = found
        assert default.size == ranks.size == explicit_size
        assert local is None
        assert pair_size == (2 if rank < 2 else "refused")
        assert alone is None, "a group of one rank needs no communication"


def sums_on_ranks(rank, size):
    group = resolve()
    whole = torch.tensor(rank + 1, dtype=torch.int64)
    # Every second column of a matrix: a collective that sent memory as it lies would send others.
    view = (torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T[:, 1] + rank).requires_grad_()
    total = sum_over(view, group)
    return (
        sum_over(whole, group).item(),
        whole.item(),
        total.tolist(),
        total.requires_grad,
        sum_over(torch.full((), 2**53, dtype=torch.int64) + 1, group).item(),
    )


def test_sums(ranks):
    size = ranks.size
    ranks_total = size * (size + 1) // 2
    for rank, found in enumerate(ranks.run(sums_on_ranks)):
        whole, untouched, view, needs_grad, large = found
        assert whole == ranks_total
        assert untouched == rank + 1, "the input must not be written"
        assert view == [size * entry + ranks_total - size for entry in (3, 4, 5)]
        assert not needs_grad
        assert large == size * (2**53 + 1), "counts are added as integers"


def sum_on_a_pair(rank, size):
    pair = dist.new_group([0, 1])
    return sum_over(torch.tensor(10.0 + rank), resolve(pair)).item() if rank < 2 else None


def test_ranks_outside_an_explicit_group_take_no_part(ranks):
    assert ranks.run(sum_on_a_pair) == [21.0, 21.0] + [None] * (ranks.size - 2)


def compiled_sum_on_ranks(rank, size):
    compiled = torch.compile(
        lambda tensor: sum_over(tensor * 2, resolve()), fullgraph=True, backend="aot_eager"
    )
    return compiled(torch.tensor(rank + 1)).item()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_sums_compile_in_one_graph(ranks):
    assert ranks.run(compiled_sum_on_ranks) == [6, 6]

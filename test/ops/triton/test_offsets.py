"""Offsets past 2^31, where a kernel that counts in 32 bits reads or writes somewhere else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ratio_kl import linear_logprob, ratio_kl

pytestmark = pytest.mark.interpreter
N = H = V = 3  # the last of three lies at 2 * APART > 2^31
# Odd: a descriptor, whose offsets are not ours, takes no such stride.
APART = 2**30 + 1


def far_apart(path: Path, matrix: Tensor, axis: int) -> Tensor:
    """The same numbers, the rows (axis 0) or columns of the matrix APART entries apart.

    They lie in a file of 8 GiB, of which only the pages that are written take space. An offset
    that wraps leads to its zeros.
    """
    strides = (APART, 1) if axis == 0 else (1, APART)
    size = 2**31 + (N - 1) * (APART + 1) + 1
    space = torch.from_file(str(path), shared=True, size=size, dtype=matrix.dtype)
    return space.as_strided(matrix.shape, strides, 2**31).copy_(matrix)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("weights", [[1, 1, 1], [0, 1, 1]], ids=["every row", "rows left out"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["hidden", "weight"])
def test_a43_a_head(tmp_path, which: int, masked: bool, weights, axis: int) -> None:
    """Illegal access on large models only (apple/ml-cross-entropy#37, DeepSpeed#8590)."""
    ids, mask = torch.arange(N), torch.tensor([not masked, True, True])

    def scored(*leaves: Tensor) -> list[Tensor]:
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        out = linear_logprob(*leaves, ids, mask, return_entropy=True, backend="triton")
        total = ((out.logps + out.entropies) * torch.tensor(weights)).sum()
        return [*out[:2], *torch.autograd.grad(total, leaves)]

    near = [torch.randn(N, H).bfloat16(), torch.randn(V, H).bfloat16()]
    far = list(near)
    far[which] = far_apart(tmp_path / "space", near[which], axis)
    for actual, expected in zip(scored(*far), scored(*near), strict=True):
        assert expected.any()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("which", [0, 1], ids=["policy", "reference"])
def test_a43_logits(tmp_path, which: int, axis: int) -> None:
    """apple/ml-cross-entropy#37 for logits: 16,384 tokens of 151,936 columns are 2.5e9 entries."""
    ids, mask, old_logps = torch.arange(N), torch.ones(N), torch.full((N,), -1.0)

    def compared(policy: Tensor, reference: Tensor) -> list[Tensor]:
        policy = policy.detach().requires_grad_()
        out = ratio_kl(policy, reference, ids, mask, old_logps, backend="triton")
        return [*out, *torch.autograd.grad(out[0].sum() + out[1].sum(), policy)]

    near = [torch.randn(N, V).bfloat16() for _ in range(2)]
    far = list(near)
    far[which] = far_apart(tmp_path / "space", near[which], axis)
    for actual, expected in zip(compared(*far), compared(*near), strict=True):
        assert expected.any()
        assert torch.equal(actual, expected)

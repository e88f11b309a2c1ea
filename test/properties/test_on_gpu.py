"""The properties of the files beside this one at larger sizes, on a GPU and Triton's real code."""

import pytest
import torch

from properties.draws import FLOATS, LARGE, Head, Loss, Sizes, heads, holds, losses
from properties.test_against_reference import logits_are_right, ratio_is_right, scored
from properties.test_loss import loss_is_right

pytestmark = pytest.mark.gpu
CUDA = "cuda"

# The float64 reference of LARGE holds 6 GB of logits; the loss's keeps several of them.
MIDDLE = Sizes(8, 120, 300, 5000)


@holds(heads(LARGE), few=20)
def test_linear_logprob(head: Head) -> None:
    scored(head, "triton", CUDA)


@holds(heads(MIDDLE, (*FLOATS, torch.float64)), few=10)
def test_linear_logprob_on_the_torch_backend(head: Head) -> None:
    scored(head, "torch", CUDA)


@holds(losses(MIDDLE, (torch.float32,), smooth=True), few=20)
def test_loss(drawn: Loss) -> None:
    loss_is_right(drawn, 1e-4, CUDA, backend="triton")


CALM = heads(MIDDLE, (torch.float32,)).filter(lambda head: head.values != "offset")


@holds(CALM, few=20)
def test_linear_ratio_kl(head: Head) -> None:
    ratio_is_right(head, "triton", CUDA)


@holds(heads(MIDDLE), few=20)
def test_ratio_kl(head: Head) -> None:
    logits_are_right(head, "triton", CUDA)

"""Inputs for Liger's GRPO loss, and Liger's own to compare with."""

import copy

import pytest
import torch

liger = pytest.importorskip("liger_kernel.chunked_loss", reason="needs liger-kernel")


def their_loss(**options):
    """Liger's, without torch.compile, which is not what is compared."""
    return liger.LigerFusedLinearGRPOLoss(compiled=False, **options)


class Batch:
    """A call's arguments by name, and how they came about.

    Six sequences with holes; old and reference log-probabilities lie around the policy's own,
    far enough away that tokens and sequences fall on both sides of the bounds.
    """

    def __init__(self, *, B=6, T=7, H=8, V=50, dtype=torch.float32, device="cpu", full=False):
        def normal(*shape):
            return torch.randn(*shape, device=device)

        self.hidden = normal(B, T, H).to(dtype).requires_grad_()
        self.weight = (normal(V, H) / H**0.5).to(dtype).requires_grad_()
        self.bias = normal(V).to(dtype).requires_grad_()
        self.ids = torch.randint(V, (B, T), device=device)
        self.mask = torch.ones(B, T, device=device)
        if not full:
            self.mask = (torch.rand(B, T, device=device) < 0.7).float()
            self.mask[:, 0] = 1
        self.advantages = normal(B)
        z = (self.hidden.double() @ self.weight.double().T).detach()
        logps = z.log_softmax(-1).gather(-1, self.ids[..., None])[..., 0].float()
        shift = 0.4 * torch.sign(normal(B, 1))
        self.old = logps + shift + 0.3 * normal(B, T)
        self.ref = logps + 0.3 * normal(B, T)
        self.ref_hidden = (self.hidden + 0.1 * normal(B, T, H)).detach().to(dtype)
        self.ref_weight = (self.weight + 0.1 * normal(V, H)).detach().to(dtype)
        self.ref_bias = normal(V).to(dtype)
        self.is_ratio = (0.3 * normal(B, T)).exp()
        self.is_ratio[self.mask == 0] = 1  # vespo: Liger lets padding in (below)

    @property
    def required(self):
        return self.hidden, self.weight, self.ids, self.mask, self.advantages

    def in_float64(self):
        """The same numbers, as leaves of their own."""
        wide = copy.copy(self)
        wide.hidden, wide.weight, wide.bias = (
            leaf.detach().double().requires_grad_()
            for leaf in (self.hidden, self.weight, self.bias)
        )
        return wide

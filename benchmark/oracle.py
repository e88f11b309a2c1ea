"""The truth in float64, block by block of tokens: every token, the whole vocabulary."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .policy_loss import coefficients
from .problem import Problem

BLOCK_BYTES = 512 * 2**20


class Truth(NamedTuple):
    """All float64; gradients None where they were not asked for."""

    logps: Tensor
    """[B, T], 0 on inactive tokens."""
    entropies: Tensor
    """[B, T], 0 on inactive tokens."""
    hidden: Tensor | None
    weight: Tensor | None


def truth(problem: Problem, *, gradients: bool) -> Truth:
    """Log-probabilities, entropies and the gradients of `policy_loss`, by the plain formulas.

    logp = z[id] - lse(z),  H = -sum p log p,  dz = g (onehot(id) - p)
    """
    mask = problem.mask
    weight = problem.weight.detach().double()
    hidden = problem.hidden.detach()[mask]
    ids = problem.action_ids[mask]
    logps = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    entropies = torch.zeros_like(logps)
    parts = [
        (log_p.gather(1, ids[rows, None])[:, 0], -(log_p.exp() * log_p).sum(1))
        for rows, _, log_p in _blocks(hidden, weight)
    ]
    logps[mask] = torch.cat([logp for logp, _ in parts])
    entropies[mask] = torch.cat([entropy for _, entropy in parts])
    if not gradients:
        return Truth(logps, entropies, None, None)

    g = coefficients(problem, entropies)
    graded = g != 0
    d_hidden = torch.zeros_like(problem.hidden, dtype=torch.float64, requires_grad=False)
    d_weight = torch.zeros_like(weight) if problem.weight.requires_grad else None
    g, ids, found = g[graded], problem.action_ids[graded], []
    for rows, block, log_p in _blocks(problem.hidden.detach()[graded], weight):
        dz = log_p.exp_().mul_(-g[rows, None])
        dz[torch.arange(len(dz), device=dz.device), ids[rows]] += g[rows]
        found.append(dz @ weight)
        if d_weight is not None:
            d_weight.addmm_(dz.T, block)
    if found:
        d_hidden[graded] = torch.cat(found)
    return Truth(logps, entropies, d_hidden, d_weight)


def _blocks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, their hidden states in float64, and the log-softmax of their logits."""
    size = max(1, BLOCK_BYTES // (8 * len(weight)))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        block = hidden[rows].double()
        logits = block @ weight.T
        yield rows, block, logits.sub_(logits.logsumexp(1, keepdim=True))


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    gap = torch.linalg.vector_norm(value.to(expected.dtype) - expected)
    return (gap / torch.linalg.vector_norm(expected)).item()


def largest_error(value: Tensor, expected: Tensor, mask: Tensor) -> float:
    """Largest absolute difference over the active tokens."""
    return (value.to(expected.dtype) - expected)[mask].abs().max().item()

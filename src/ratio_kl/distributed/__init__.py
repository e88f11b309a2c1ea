"""Collectives: sums, quantiles and scores over groups of ranks. Imports nothing of the library."""

from .groups import Group, Ranks, resolve, sum_over, world_size
from .quantile import masked_quantile

__all__ = ["Group", "Ranks", "masked_quantile", "resolve", "sum_over", "world_size"]

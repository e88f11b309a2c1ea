"""Collectives: sums and quantiles over a group of ranks. Imports nothing of the library."""

from .groups import Group, resolve, sum_over, world_size
from .quantile import masked_quantile

__all__ = ["Group", "masked_quantile", "resolve", "sum_over", "world_size"]

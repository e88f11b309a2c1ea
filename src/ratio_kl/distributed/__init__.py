"""Collectives: sums, quantiles and scores over groups of ranks. Imports nothing of the library."""

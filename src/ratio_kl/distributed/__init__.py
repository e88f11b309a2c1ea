"""Collectives: sums, quantiles and scores over groups of ranks. Imports nothing of the library.

groups.py        which ranks a call communicates with, and its collectives
shared_sum.py    a sum over ranks with a gradient
quantile.py      the quantile of the active values of all ranks
vocabulary.py    which rows of a head lie where, and how the ranks' scores are put together
"""

"""Triton kernels, imported by ratio_kl.ops.triton only, and lazily.

score.py, merge.py    pass 1: tiles of logits reduced, then put together row by row
dlogits.py            pass 2: tiles of logits turned into their gradient
rows.py               rows picked out of a matrix, and put back
ratio_kl.py           ratio and KL from logits, and their gradient
primitives.py         device functions that they share
tiles.py              tile shapes, as data
"""

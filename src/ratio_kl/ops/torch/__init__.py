"""The torch backend: chunked eager PyTorch, on any device and in float64 too.

linear.py      the two passes of a head
tiling.py      tiles that fit the budget, and their logits
products.py    a gradient as a sum of products over tiles
logits.py      ratio and KL from logits
"""

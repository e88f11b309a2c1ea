"""The Triton backend. Nothing above imports it, or Triton, before its first use.

linear.py       the two passes of a head; the order of pass 1's launches
gradients.py    pass 2: blocks of dx, and what is launched while the host waits
blocks.py       how rows and vocabulary are cut into blocks that fit the budget
rows.py         which rows pass 2 computes
products.py     its matrix products, and their sums over blocks
launch.py       launches of the matrix kernels
lists.py        launches of the kernels that pick out rows
logits.py       ratio and KL from logits
call.py         a kernel's call without Triton's own look-up
support.py      where Triton can run
"""

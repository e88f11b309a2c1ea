"""The loss between the passes: plain torch on per-token tensors, with no vocabulary in sight.

loss.py         a call from its arguments to its loss: checks, pass 1, surrogate
inputs.py       the caller's tensors, checked and in one form
sequences.py    padded and packed layouts: sums over sequences and their way back
exchange.py     what ranks tell each other between the passes
surrogate.py    the terms put together
ratio.py        importance ratios, at three levels
policy.py       policy terms, and what each loss type is made of
kl.py           estimators of the KL to the reference
entropy.py      the mask of high-entropy tokens, and the entropy bonus
reduction.py    the weight of each token in the sum
bounds.py       clamps with the gradient that the loss wants
metrics.py      what a call shows of itself
stash.py        both passes in forward
ratio_kl.py     the public ratio_kl and linear_ratio_kl
"""

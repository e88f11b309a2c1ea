"""The two passes over the lm_head: the only code, with the kernels, that knows the vocabulary.

linear_logprob.py       the public primitive
passes.py               options resolved, then one operator call a pass
operators.py            the passes as torch operators
sharded_operators.py    the same for a head cut over ranks
sharding.py             what it means that a head is cut
logits_logprob.py       ratio and KL from logits that the caller holds, as an operator
registration.py         how a function becomes an operator
backends.py             which backend runs it
contract.py             what operators and backends say to each other
torch/, triton/         the backends
"""

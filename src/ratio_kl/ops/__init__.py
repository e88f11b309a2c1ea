"""The two passes over the lm_head: the only code, with the kernels, that knows the vocabulary."""

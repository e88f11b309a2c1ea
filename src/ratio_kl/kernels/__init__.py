"""Triton kernels, one file a kernel. Imported by ratio_kl.ops.triton only, and lazily."""

"""The Triton backend: memory, the order of launches, and the launches. Only here is Triton seen
above the kernels; nothing above imports this before its first use."""

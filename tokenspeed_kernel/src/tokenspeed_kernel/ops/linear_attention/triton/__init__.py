"""Kernels in Triton, for NVIDIA and AMD GPUs; nothing here is imported until one is bound."""

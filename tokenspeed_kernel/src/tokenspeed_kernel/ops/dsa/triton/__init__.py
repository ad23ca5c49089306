"""Kernels in Triton, for NVIDIA and AMD GPUs."""

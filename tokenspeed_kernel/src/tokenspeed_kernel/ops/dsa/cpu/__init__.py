"""Kernels for the host processor, in PyTorch."""

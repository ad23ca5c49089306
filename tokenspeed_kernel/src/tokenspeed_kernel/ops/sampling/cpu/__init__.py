"""Kernels on PyTorch's vectorised CPU operations; `specs` lists them, and nothing here is imported until one is bound."""

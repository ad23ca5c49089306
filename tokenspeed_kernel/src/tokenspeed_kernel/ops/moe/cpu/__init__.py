"""CPU kernels; `specs` lists them, and nothing here is imported until one is bound."""

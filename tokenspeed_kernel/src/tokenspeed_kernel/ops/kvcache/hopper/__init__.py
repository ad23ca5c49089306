"""Cache kernels made for Hopper."""

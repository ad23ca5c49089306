"""Sparse attention kernels made for Hopper."""

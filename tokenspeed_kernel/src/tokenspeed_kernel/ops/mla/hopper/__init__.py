"""Latent attention kernels made for Hopper."""

"""Gluon's calls whose names differ between the Triton versions that we support: one place knows them."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["block_barrier", "load_tile"]

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of the block wait for each other. Triton 3.6 calls it thread_barrier."""
# Names that later versions removed still exist there, and raise: the new one goes first.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, destination): bulk copy of a tile. Triton 3.6 calls it async_copy_global_to_shared."""

"""Gluon's calls whose names differ between the Triton versions that we support: one place knows them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["block_barrier", "copy_async", "load_tile", "store_tile", "view_as", "wait_stores"]

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of the block wait for each other. Triton 3.6 calls it thread_barrier."""
# Names that later versions removed still exist there, and raise: the new one goes first.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, destination): bulk copy of a tile. Triton 3.6 calls it async_copy_global_to_shared."""
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""(destination, pointers, mask): each thread asks for copies of its elements. Triton 3.6 calls it async_copy_global_to_shared."""
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""(descriptor, coordinates, source): bulk copy of a tile to memory. Triton 3.6 calls it async_copy_shared_to_global."""
wait_stores = tma.store_wait
"""(number that may still be on their way): until bulk copies to memory have read their sources."""


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def view_as(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same shared memory with another shape. Triton 3.6 calls it _reinterpret."""
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)

else:

    @gluon.jit
    def view_as(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same shared memory with another shape. Triton 3.6 calls it _reinterpret."""
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)

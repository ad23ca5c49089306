"""Gluon's calls whose names differ between the Triton versions that we support; see `tokenspeed_kernel.ops.gluon_names`."""

from __future__ import annotations

from tokenspeed_kernel.ops.gluon_names import block_barrier, load_tile

__all__ = ["block_barrier", "load_tile"]

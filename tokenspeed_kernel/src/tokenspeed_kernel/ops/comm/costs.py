"""Least work of the collectives in a process's memory: what it brings is read, what it gets is written. Wires do not count."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.case import Cost

__all__ = ["COSTS"]

_OPS: Final = (
    "comm.all_reduce",
    "comm.reduce_scatter",
    "comm.all_gather",
    "comm.all_to_all",
    "comm.all_reduce_add_rms_norm",
)
# Bandwidth alone is the limit.
COSTS: Final = {op: Cost() for op in _OPS}
"""By op."""

"""Least work of the latent cache write: new rows are read and written once; nothing else of the pool is touched."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.mla.contract import WRITE_MLA_CACHE

__all__ = ["COSTS"]


def _write_bytes(inputs: dict[str, Any], result: Any) -> int:
    parts, slots, cache = (inputs["latent"], inputs["rope"]), inputs["slot_mapping"], inputs["kv_cache"]
    moved = sum(part.numel() * (part.element_size() + cache.element_size()) for part in parts)
    return int(moved + slots.numel() * slots.element_size())


COSTS: Final = {WRITE_MLA_CACHE.name: Cost(_write_bytes)}
"""By op. The cases of the others count their own operations, and every row of their pools is read."""

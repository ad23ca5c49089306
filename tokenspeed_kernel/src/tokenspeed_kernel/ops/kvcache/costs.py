"""Least work of the cache ops: what is new, or named by a list, is read and written; nothing else of a pool is touched."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.kvcache.contract import COPY_PAGES, QUANTIZE_KV, ROPE_WRITE_KV, TRANSFER_PAGES, WRITE_KV, WRITE_SCALED_KV

__all__ = ["COSTS"]


def _write_bytes(inputs: dict[str, Any], result: Any) -> int:
    """New keys and values are read and written once."""
    k, cache, slots = inputs["k"], inputs["k_cache"], inputs["slot_mapping"]
    return int(2 * k.numel() * (k.element_size() + cache.element_size()) + slots.numel() * slots.element_size())


def _rope_write_bytes(inputs: dict[str, Any], result: Any) -> int:
    """Queries are read and written once, keys and values as `_write_bytes` says; of the table, the positions' rows are read."""
    q, positions, table = inputs["q"], inputs["positions"], inputs["cos_sin_cache"]
    rows = positions.numel() * (table.shape[-1] * table.element_size() + positions.element_size())
    return int(2 * q.numel() * q.element_size() + rows) + _write_bytes(inputs, result)


def _copy_bytes(inputs: dict[str, Any], result: Any) -> int:
    """Each page is read and written twice: pages may follow each other, so that they go through scratch memory."""
    return 2 * _page_bytes(inputs["pool"], inputs)


def _transfer_bytes(inputs: dict[str, Any], result: Any) -> int:
    """Each page is read and written once."""
    return _page_bytes(inputs["src_pool"], inputs)


def _page_bytes(pool: Any, inputs: dict[str, Any]) -> int:
    return int(2 * inputs["src_pages"].numel() * pool[0].numel() * pool.element_size())


COSTS: Final = {
    WRITE_KV.name: Cost(_write_bytes),
    WRITE_SCALED_KV.name: Cost(_write_bytes),
    QUANTIZE_KV.name: Cost(),
    ROPE_WRITE_KV.name: Cost(_rope_write_bytes),
    COPY_PAGES.name: Cost(_copy_bytes),
    TRANSFER_PAGES.name: Cost(_transfer_bytes),
}
"""By op."""

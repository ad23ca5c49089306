"""Least work of latent attention, and of the write of its cache."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.mla.contract import MLA_DECODE, MLA_EXTEND, MLA_PREFILL, ROPE_WRITE_MLA, WRITE_MLA_CACHE

__all__ = ["COSTS"]


def _pairs(inputs: dict[str, Any]) -> int:
    """Pairs of query and key that attend."""
    keys = inputs["seq_lens"].tolist() if "seq_lens" in inputs else inputs["cu_seqlens_k"].diff().tolist()
    queries = inputs["cu_seqlens_q"].diff().tolist() if "cu_seqlens_q" in inputs else [inputs["q"].shape[1]] * len(keys)
    causal, pairs = inputs.get("causal", True), 0
    for some, many in zip(queries, keys, strict=True):
        seen = min(some, many)
        pairs += some * many - (seen * (seen - 1) // 2 + (some - seen) * many if causal else 0)
    return pairs


def _latent_flops(inputs: dict[str, Any]) -> int:
    """Products for scores over the whole row, and for values over its latent part."""
    heads, width = inputs["q"].shape[-2:]
    return int(2 * _pairs(inputs) * heads * (width + int(inputs.get("latent_dim", 512))))


def _expanded_flops(inputs: dict[str, Any]) -> int:
    heads, width = inputs["q"].shape[-2:]
    return int(2 * _pairs(inputs) * heads * (width + inputs["v"].shape[-1]))


def _write_bytes(inputs: dict[str, Any], result: Any) -> int:
    """New rows are read and written once; nothing else of the pool is touched."""
    parts, slots, cache = (inputs["latent"], inputs["rope"]), inputs["slot_mapping"], inputs["kv_cache"]
    moved = sum(part.numel() * part.element_size() for part in parts) + slots.numel() * cache.shape[2] * cache.element_size()
    return int(moved + slots.numel() * slots.element_size())


def _rope_write_bytes(inputs: dict[str, Any], result: Any) -> int:
    """Rope parts of the queries, and the new rows, are read and written once; of the table, the positions' rows are read."""
    q, row, positions, table = inputs["q_rope"], inputs["kv_cache"], inputs["positions"], inputs["cos_sin_cache"]
    moved = 2 * q.numel() * q.element_size() + 2 * positions.numel() * row.shape[2] * row.element_size()
    rows = positions.numel() * (table.shape[1] * table.element_size() + positions.element_size())
    return int(moved + rows + inputs["slot_mapping"].numel() * inputs["slot_mapping"].element_size())


COSTS: Final = {
    # Every row of the cases' pools is read, by several requests where these share it.
    MLA_DECODE.name: Cost(flops=_latent_flops),
    MLA_EXTEND.name: Cost(flops=_latent_flops),
    MLA_PREFILL.name: Cost(flops=_expanded_flops),
    WRITE_MLA_CACHE.name: Cost(_write_bytes),
    ROPE_WRITE_MLA.name: Cost(_rope_write_bytes),
}
"""By op."""

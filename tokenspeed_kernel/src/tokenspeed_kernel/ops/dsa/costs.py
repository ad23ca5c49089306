"""Least work of sparse attention: the keys of each request, or those that some slot names, are read once."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.dsa.contract import INDEXER_SCORES, INDEXER_SCORES_RAGGED, SPARSE_DECODE, SPARSE_PREFILL, TOPK_SLOTS

__all__ = ["COSTS"]


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _lengths(inputs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Queries and keys of each request."""
    keys = inputs["seq_lens"] if "seq_lens" in inputs else inputs["cu_seqlens_k"].diff()
    return inputs["cu_seqlens_q"].diff().tolist(), keys.tolist()


def _scores_bytes(inputs: dict[str, Any], result: Any) -> int:
    q, k = inputs["q"], inputs["k_cache"] if "k_cache" in inputs else inputs["k"]
    queries, keys = _lengths(inputs)
    scale = 0 if inputs.get("k_scale") is None else inputs["k_scale"].element_size()
    read = sum(many for some, many in zip(queries, keys, strict=True) if some)
    return _size(q) + _size(inputs["weights"]) + _size(result) + int(read * (k.shape[-1] * k.element_size() + scale))


def _scores_flops(inputs: dict[str, Any]) -> int:
    """A product of each query head and key."""
    queries, keys = _lengths(inputs)
    heads, dim = inputs["q"].shape[-2:]
    return int(2 * heads * dim * sum(some * many for some, many in zip(queries, keys, strict=True)))


def _sparse_bytes(inputs: dict[str, Any], result: Any) -> int:
    cache, slots = inputs["kv_cache"], inputs["slots"]
    named = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])].unique().numel()
    results = result if isinstance(result, tuple) else (result,)
    rows = named * cache.shape[-1] * cache.element_size()
    return int(rows) + _size(inputs["q"]) + _size(slots) + sum(map(_size, results))


def _sparse_flops(inputs: dict[str, Any]) -> int:
    """Products for scores over the whole row, and for values over its latent part."""
    q, latent_dim = inputs["q"], int(inputs.get("latent_dim", 512))
    return int(2 * inputs["slots"].numel() * q.shape[-2] * (q.shape[-1] + latent_dim))


COSTS: Final = {
    INDEXER_SCORES.name: Cost(_scores_bytes, _scores_flops),
    INDEXER_SCORES_RAGGED.name: Cost(_scores_bytes, _scores_flops),
    SPARSE_DECODE.name: Cost(_sparse_bytes, _sparse_flops),
    SPARSE_PREFILL.name: Cost(_sparse_bytes, _sparse_flops),
    TOPK_SLOTS.name: Cost(),
}
"""By op."""

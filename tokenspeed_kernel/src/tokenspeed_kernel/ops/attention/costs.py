"""Least work of attention: the keys and values that some query sees are read once, the rest of a pool is not."""

from __future__ import annotations

from typing import Any, Final

import torch

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.attention.contract import (
    MERGE_STATES,
    MHA_DECODE,
    MHA_DECODE_SCALED,
    MHA_EXTEND,
    MHA_EXTEND_SCALED,
    MHA_PREFILL,
)

__all__ = ["COSTS"]


def _lengths(inputs: dict[str, Any]) -> list[tuple[int, int]]:
    """(queries, keys) of each request."""
    if "cu_seqlens_k" in inputs:
        keys = inputs["cu_seqlens_k"].diff().tolist()
    else:
        keys = inputs["seq_lens"].tolist()
    queries = inputs["cu_seqlens_q"].diff().tolist() if "cu_seqlens_q" in inputs else [1] * len(keys)
    return list(zip(queries, keys, strict=True))


def _seen(inputs: dict[str, Any], queries: int, keys: int) -> tuple[int, int]:
    """Keys that some query of a request sees, and pairs of query and key that are multiplied."""
    window, causal = inputs.get("sliding_window"), inputs.get("causal", True)
    pairs = 0
    first = keys
    for query in range(queries):
        last = keys - queries + query + 1 if causal else keys
        start = max(0, last - window) if window else 0
        pairs += max(0, last - start)
        first = min(first, start)
    return max(0, keys - first) if queries else 0, pairs


def _moved_bytes(inputs: dict[str, Any], result: Any) -> int:
    cache = inputs["k_cache"] if "k_cache" in inputs else inputs["k"]
    row = cache.shape[-2] * cache.shape[-1] * cache.element_size()
    keys = sum(_seen(inputs, queries, keys)[0] for queries, keys in _lengths(inputs))
    results = result if isinstance(result, tuple) else (result,)
    scales = [inputs[name] for name in ("k_scale", "v_scale") if name in inputs]
    tensors: list[torch.Tensor] = [inputs["q"], *scales, *results]
    return int(2 * keys * row + sum(one.numel() * one.element_size() for one in tensors))


def _flops(inputs: dict[str, Any]) -> int:
    """Two products, for scores and for values, of two operations each."""
    q = inputs["q"]
    pairs = sum(_seen(inputs, queries, keys)[1] for queries, keys in _lengths(inputs))
    return int(4 * pairs * q.shape[-2] * q.shape[-1])


_OVER_KEYS: Final = (MHA_DECODE, MHA_EXTEND, MHA_PREFILL, MHA_DECODE_SCALED, MHA_EXTEND_SCALED)
COSTS: Final = {**{op.name: Cost(_moved_bytes, _flops) for op in _OVER_KEYS}, MERGE_STATES.name: Cost()}
"""By op."""

"""Attention to given slots on the CPU: the rows of some queries are gathered, and multiplied as a batch."""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.mla.cpu.softmax import RunningSoftmax, compute_dtype

__all__ = ["sparse_decode", "sparse_prefill"]

_GATHERED_ELEMENTS = 1 << 21
"""Elements of the rows that are gathered at once: 8 MB in float32."""


def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest queries to given slots; see the public op for the contract."""
    if out is None:
        out = torch.empty((*q.shape[:3], latent_dim), dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    for request in range(q.shape[0]):
        own_lse = None if lse is None else lse[request]
        _attend(q[request], kv_cache, slots[request], softmax_scale, out[request], own_lse)
    return out if lse is None else (out, lse)


def sparse_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend many queries to given slots; see the public op for the contract."""
    if out is None:
        out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    _attend(q, kv_cache, slots, softmax_scale, out, lse)
    return out if lse is None else (out, lse)


def _attend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Queries [n, H, width] over slots [n, num_slots] into out [n, H, latent_dim] and lse [n, H]."""
    num_pages, page_size, width = kv_cache.shape
    num_queries, num_heads, _ = q.shape
    num_slots, latent_dim, dtype = slots.shape[1], out.shape[-1], compute_dtype(q.dtype)
    block = min(max(num_slots, 1), max(16, _GATHERED_ELEMENTS // width))
    step = max(1, _GATHERED_ELEMENTS // (block * width))
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        queries = q[first:last].to(dtype) * softmax_scale
        softmax = RunningSoftmax(last - first, num_heads, latent_dim, dtype)
        for start in range(0, num_slots, block):
            own = slots[first:last, start : start + block].long()
            there = (own >= 0) & (own < num_pages * page_size)
            if not bool(there.any()):
                continue
            found = own[there]
            pages = torch.div(found, page_size, rounding_mode="floor")
            # Rows of entries that are ignored stay 0: whatever a slot holds could be NaN.
            rows = torch.zeros((*own.shape, width), dtype=dtype)
            rows[there] = kv_cache[pages, found - pages * page_size].to(dtype)
            logits = torch.bmm(queries, rows.transpose(1, 2)).masked_fill_(~there.unsqueeze(1), -math.inf)
            softmax.add(slice(None), logits, rows[..., :latent_dim])
        outputs, total = softmax.finish()
        out[first:last].copy_(outputs)
        if lse is not None:
            lse[first:last].copy_(total)

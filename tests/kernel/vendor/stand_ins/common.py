"""Attention in float64 over the rows of pages, as strict as the libraries are."""

from __future__ import annotations

import math
from typing import Any

import torch

NAN = float("nan")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H, D] queries at the tail of [L, Hkv, D] keys; NaN for a query that sees none. The LSE has base 2."""
    n, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    if length == 0:
        return torch.full((n, num_heads, v.shape[-1]), NAN), torch.full((n, num_heads), NAN)
    k, v = (one.double().repeat_interleave(num_heads // num_kv_heads, 1) for one in (k, v))
    logits = torch.einsum("nhd,lhd->nhl", q.double(), k) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    if causal:
        hidden = torch.arange(length) > torch.arange(n).unsqueeze(1) + length - n
        logits.masked_fill_(hidden.unsqueeze(1), -math.inf)
    return torch.einsum("nhl,lhd->nhd", logits.softmax(-1), v), logits.logsumexp(-1) / math.log(2)


def rows_of(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of those pages; the library would read outside of the cache where a page is not in it."""
    assert bool(((pages >= 0) & (pages < cache.shape[0])).all()), "a page outside of the cache was asked for"
    return cache[pages.long()].flatten(0, 1)[:length]


def check_workspace(buffer: torch.Tensor) -> None:
    """As the library: aligned bytes."""
    assert buffer.dtype is torch.uint8 and buffer.numel() >= 1 << 20 and buffer.data_ptr() % 16 == 0


def check_csr(indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """int32, consistent."""
    assert indptr.dtype is torch.int32 and indices.dtype is torch.int32
    assert indptr[0] == 0 and indptr[-1] == len(indices)


def deliver(result: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, out: torch.Tensor | None, return_lse: bool) -> Any:
    """Write into `out`, which must be contiguous and of q's dtype."""
    if out is None:
        out = torch.empty(result.shape, dtype=q.dtype)
    assert out.is_contiguous() and out.dtype is q.dtype and out.shape == result.shape
    out.copy_(result)
    return (out, lse.float()) if return_lse else out

"""Attention of ragged queries to ragged expanded keys on the CPU, by blocks of queries and keys."""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.attention.cpu.schedule import check_lengths
from tokenspeed_kernel.ops.mla.cpu.softmax import RunningSoftmax, compute_dtype

__all__ = ["mla_prefill"]

_BLOCK_KEYS = 512
_BLOCK_LOGITS = 1 << 20
"""Logits of one block: 4 MB in float32, which a shared cache holds beside the keys."""


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend ragged queries to ragged expanded keys; see the public op for the contract."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check_lengths("mla.mla_prefill", starts_q, q.shape[0], "cu_seqlens_q")
    check_lengths("mla.mla_prefill", starts_k, k.shape[0], "cu_seqlens_k")
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    if out is None:
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    for request in range(len(starts_q) - 1):
        rows = slice(starts_q[request], starts_q[request + 1])
        own = slice(starts_k[request], starts_k[request + 1])
        _attend(q[rows], k[own], v[own], scale, causal, out[rows], None if lse is None else lse[rows])
    return out if lse is None else (out, lse)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """One request. Its heads are a batch of products; the heads of one key head are rows beside each other."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, value_dim = v.shape
    group, dtype = num_heads // num_kv_heads, compute_dtype(q.dtype)
    first_position = num_keys - num_queries
    step = max(1, _BLOCK_LOGITS // (_BLOCK_KEYS * num_heads))
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        # [Hkv, queries * group, D]
        mine = q[first:last].to(dtype).reshape(last - first, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2) * scale
        softmax = RunningSoftmax(num_kv_heads, mine.shape[1], value_dim, dtype)
        seen = max(0, min(num_keys, first_position + last)) if causal else num_keys
        for start in range(0, seen, _BLOCK_KEYS):
            end = min(start + _BLOCK_KEYS, seen)
            logits = mine @ k[start:end].to(dtype).permute(1, 2, 0)
            if causal and first_position + first < end - 1:
                positions = torch.arange(first_position + first, first_position + last)[:, None, None]
                hidden = torch.arange(start, end) > positions
                logits.view(num_kv_heads, last - first, group, end - start).masked_fill_(hidden, -math.inf)
            softmax.add(slice(None), logits, v[start:end].to(dtype).transpose(0, 1))
        outputs, total = softmax.finish()
        shape = (num_kv_heads, last - first, group)
        out[first:last].view(last - first, num_kv_heads, group, value_dim).copy_(outputs.view(*shape, value_dim).transpose(0, 1))
        if lse is not None:
            lse[first:last].view(last - first, num_kv_heads, group).copy_(total.view(shape).transpose(0, 1))

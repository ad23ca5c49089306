"""The truth of the latent attention family: one query row at a time over the keys that it sees, in float64.

Only keys that a row sees are ever read, so whatever lies in masked slots cannot leak into a result.
"""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.mla.packed import pack_rows, unpack_rows
from tokenspeed_kernel.ops.rope import reference as rotation

__all__ = ["attend_row", "mla_decode", "mla_extend", "mla_prefill", "rope_write_mla", "write_mla_cache"]


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = 512,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest queries to its paged latent cache; see the public op for the contract."""
    num_reqs, q_len, num_heads, _ = q.shape
    result, lse = mla_extend(
        q.flatten(0, 1),
        kv_cache,
        page_table,
        torch.arange(num_reqs + 1, dtype=torch.int32) * q_len,
        seq_lens,
        max_seqlen_q=q_len,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        latent_dim=latent_dim,
        causal=causal,
        return_lse=True,
    )
    result = result.view(num_reqs, q_len, num_heads, latent_dim)
    result = result if out is None else out.copy_(result)
    return (result, lse.view(num_reqs, q_len, num_heads)) if return_lse else result


def mla_extend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = 512,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend ragged new queries to their requests' paged latent cache; see the public op for the contract."""
    num_pages, page_size, _ = kv_cache.shape
    result = torch.zeros((*q.shape[:2], latent_dim), dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    starts = cu_seqlens_q.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        keys = torch.arange(max(seq_len, 0), device=q.device)
        pages = page_table[request, keys // page_size].long()
        there = (pages >= 0) & (pages < num_pages)
        keys, pages = keys[there], pages[there]
        rows = range(starts[request], starts[request + 1])
        for row in rows:
            position = seq_len - len(rows) + (row - rows.start)
            seen = keys <= position if causal else keys >= 0
            found = kv_cache[pages[seen], keys[seen] % page_size]
            found = unpack_rows(found, latent_dim, torch.float64) if found.dtype is torch.uint8 else found.to(torch.float64)
            result[row], lse[row] = attend_row(q[row], found, found[:, :latent_dim], softmax_scale)
    result = result.to(q.dtype) if out is None else out.copy_(result)
    return (result, lse.to(torch.float32)) if return_lse else result


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
    num_heads, head_dim = q.shape[1:]
    group = num_heads // k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    result = torch.zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(starts_q) - 1):
        own = slice(starts_k[request], starts_k[request + 1])
        keys, values = (one[own].to(torch.float64).repeat_interleave(group, dim=1) for one in (k, v))
        rows = range(starts_q[request], starts_q[request + 1])
        for row in rows:
            position = len(keys) - len(rows) + (row - rows.start)
            seen = max(position + 1, 0) if causal else len(keys)
            result[row], lse[row] = attend_row(q[row], keys[:seen].transpose(0, 1), values[:seen].transpose(0, 1), scale)
    result = result.to(q.dtype) if out is None else out.copy_(result)
    return (result, lse.to(torch.float32)) if return_lse else result


def write_mla_cache(latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write latent rows into their slots; see the public op for the contract."""
    num_pages, page_size, _ = kv_cache.shape
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_pages * page_size:
            if kv_cache.dtype is torch.uint8:
                row = pack_rows(latent[token : token + 1], rope[token : token + 1])[0]
            else:
                row = torch.cat((latent[token], rope[token])).to(kv_cache.dtype)
            kv_cache[slot // page_size, slot % page_size] = row


def rope_write_mla(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate, then write; see the public op for the contract."""
    key = k_rope[:, None]
    rotated_q, rotated_k = rotation.apply_rope(q_rope, key, positions, cos_sin_cache, interleaved=interleaved, q_out=q_out)
    write_mla_cache(latent, rotated_k[:, 0], kv_cache, slot_mapping)
    return rotated_q


def attend_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query [H, D] over n float64 keys [n, D] or [H, n, D]: the output [H, V] and the LSE [H]."""
    logits = torch.einsum("hd,nd->hn" if keys.dim() == 2 else "hd,hnd->hn", q.to(torch.float64), keys) * softmax_scale
    if logits.shape[1] == 0:
        return logits.new_zeros((len(q), values.shape[-1])), logits.new_full((len(q),), -math.inf)
    lse = torch.logsumexp(logits, dim=1)
    weights = torch.exp(logits - lse[:, None])
    return torch.einsum("hn,nd->hd" if values.dim() == 2 else "hn,hnd->hd", weights, values), lse

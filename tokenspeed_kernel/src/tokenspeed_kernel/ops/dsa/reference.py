"""The truth of the sparse attention family: one query row at a time, in float64.

Only keys that a row sees are ever read, so whatever lies in masked slots cannot leak into a result.
"""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.mla.reference import attend_row

__all__ = ["indexer_scores", "indexer_scores_ragged", "sparse_decode", "sparse_prefill", "topk_slots"]


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score each key of a request for each of its queries, in a paged cache; see the public op for the contract."""
    num_pages, page_size, _ = k_cache.shape
    scores = torch.full((q.shape[0], max_seqlen_k), -math.inf, dtype=torch.float64, device=q.device)
    starts = cu_seqlens_q.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        positions = torch.arange(max(length, 0), device=q.device)
        pages = page_table[request, positions // page_size].long()
        there = (pages >= 0) & (pages < num_pages)
        positions, pages = positions[there], pages[there]
        where = (pages, positions % page_size)
        keys = _scaled(k_cache[where], None if k_scale is None else k_scale[where])
        rows = range(starts[request], starts[request + 1])
        for row in rows:
            position = length - len(rows) + (row - rows.start)
            seen = positions <= position if causal else positions >= 0
            scores[row, positions[seen]] = _score_row(q[row], weights[row], keys[seen])
    return scores.to(torch.float32) if out is None else out.copy_(scores)


def indexer_scores_ragged(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score each key of a request for each of its queries, over ragged keys; see the public op for the contract."""
    scores = torch.full((q.shape[0], max_seqlen_k), -math.inf, dtype=torch.float64, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(starts_q) - 1):
        own = slice(starts_k[request], starts_k[request + 1])
        keys = _scaled(k[own], None if k_scale is None else k_scale[own])
        rows = range(starts_q[request], starts_q[request + 1])
        for row in rows:
            position = len(keys) - len(rows) + (row - rows.start)
            seen = max(position + 1, 0) if causal else len(keys)
            scores[row, :seen] = _score_row(q[row], weights[row], keys[:seen])
    return scores.to(torch.float32) if out is None else out.copy_(scores)


def topk_slots(
    scores: torch.Tensor,
    k: int,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the k best scores of each row, and give their slots; see the public op for the contract."""
    slots = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    starts = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    request = 0
    for row, values in enumerate(scores.tolist()):
        eligible = [position for position, value in enumerate(values) if value > -math.inf]  # false for NaN
        chosen = sorted(sorted(eligible, key=lambda position: (-values[position], position))[:k])
        if page_table is not None and starts is not None:
            while starts[request + 1] <= row:
                request += 1
            pages = page_table[request].tolist()
            found = [pages[position // page_size] * page_size + position % page_size for position in chosen]
            chosen = [slot if 0 <= slot < 2**31 else -1 for slot in found]
        slots[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return slots.to(scores.device) if out is None else out.copy_(slots)


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
    result, lse = sparse_prefill(
        q.flatten(0, 1), kv_cache, slots.flatten(0, 1), softmax_scale=softmax_scale, latent_dim=latent_dim, return_lse=True
    )
    result = result.view(*q.shape[:3], latent_dim)
    result = result if out is None else out.copy_(result)
    return (result, lse.view(q.shape[:3])) if return_lse else result


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
    num_pages, page_size, _ = kv_cache.shape
    result = torch.zeros((*q.shape[:2], latent_dim), dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    for row in range(q.shape[0]):
        own = slots[row].long()
        own = own[(own >= 0) & (own < num_pages * page_size)]
        keys = kv_cache[own // page_size, own % page_size].to(torch.float64)
        result[row], lse[row] = attend_row(q[row], keys, keys[:, :latent_dim], softmax_scale)
    result = result.to(q.dtype) if out is None else out.copy_(result)
    return (result, lse.to(torch.float32)) if return_lse else result


def _scaled(keys: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    keys = keys.to(torch.float64)
    return keys if scale is None else keys * scale.to(torch.float64)[:, None]


def _score_row(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One query [H, D] with weights [H] over n keys [n, D]: the scores [n]."""
    return torch.einsum("h,hn->n", weights.to(torch.float64), torch.relu(q.to(torch.float64) @ keys.t()))

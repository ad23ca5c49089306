"""Scores of the indexer on the CPU, by blocks of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tokenspeed_kernel.ops.attention.cpu.schedule import check_lengths
from tokenspeed_kernel.ops.mla.cpu.softmax import compute_dtype

__all__ = ["indexer_scores", "indexer_scores_ragged"]

_BLOCK_KEYS = 1024
_BLOCK_LOGITS = 1 << 20
"""Logits of one block: 4 MB in float32, which a shared cache holds beside the keys."""


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
    starts = cu_seqlens_q.tolist()
    check_lengths("dsa.indexer_scores", starts, q.shape[0], "cu_seqlens_q")
    out = _masked(q, max_seqlen_k, out)
    for request, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        pages_of_request = page_table[request].long()
        for first in range(0, min(length, max_seqlen_k), _BLOCK_KEYS):
            positions = torch.arange(first, min(first + _BLOCK_KEYS, length, max_seqlen_k))
            columns = torch.div(positions, page_size, rounding_mode="floor")
            pages = pages_of_request[columns]
            there = (pages >= 0) & (pages < num_pages)
            if not bool(there.all()):
                positions, columns, pages = positions[there], columns[there], pages[there]
            where = (pages, positions - columns * page_size)
            scale = None if k_scale is None else k_scale[where]
            _score(q[rows], weights[rows], k_cache[where], scale, positions, length, causal, out[rows])
    return out


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
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check_lengths("dsa.indexer_scores_ragged", starts_q, q.shape[0], "cu_seqlens_q")
    check_lengths("dsa.indexer_scores_ragged", starts_k, k.shape[0], "cu_seqlens_k")
    out = _masked(q, max_seqlen_k, out)
    for request in range(len(starts_q) - 1):
        rows = slice(starts_q[request], starts_q[request + 1])
        begin, length = starts_k[request], starts_k[request + 1] - starts_k[request]
        for first in range(0, min(length, max_seqlen_k), _BLOCK_KEYS):
            last = min(first + _BLOCK_KEYS, length, max_seqlen_k)
            own = slice(begin + first, begin + last)
            scale = None if k_scale is None else k_scale[own]
            _score(q[rows], weights[rows], k[own], scale, torch.arange(first, last), length, causal, out[rows])
    return out


def _masked(q: torch.Tensor, num_keys: int, out: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((q.shape[0], num_keys), dtype=torch.float32) if out is None else out
    return out.fill_(-math.inf)


def _score(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    positions: torch.Tensor,
    length: int,
    causal: bool,
    out: torch.Tensor,
) -> None:
    """One request's queries over a block of its keys, which stand at ``positions``."""
    dtype = compute_dtype(q.dtype)
    transposed = keys.to(dtype).t()
    for first, last in _blocks(len(q), q.shape[1] * max(len(positions), 1)):
        logits = torch.relu_(q[first:last].to(dtype) @ transposed)  # [n, H, keys]
        scores = torch.bmm(weights[first:last].to(dtype).unsqueeze(1), logits).squeeze(1)
        if scale is not None:
            scores *= scale
        if causal:
            own = torch.arange(length - len(q) + first, length - len(q) + last)[:, None]
            scores.masked_fill_(positions > own, -math.inf)
        out[first:last, positions] = scores.to(torch.float32)


def _blocks(num_queries: int, logits_per_query: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_LOGITS // logits_per_query)
    for first in range(0, num_queries, step):
        yield first, min(first + step, num_queries)

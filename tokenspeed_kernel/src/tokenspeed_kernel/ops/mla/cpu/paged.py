"""Attention over a paged latent cache on the CPU: blocks of keys are gathered once and meet all of a request's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.cpu.schedule import check_lengths
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.mla.cpu.softmax import RunningSoftmax, compute_dtype
from tokenspeed_kernel.ops.mla.packed import unpack_rows

__all__ = ["mla_decode", "mla_extend"]

_BLOCK_KEYS = 512
_BLOCK_LOGITS = 1 << 20
"""Logits of one block: 4 MB in float32, which a shared cache holds beside the keys."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where a request's keys lie; keys on pages that do not exist are left out.

    Attributes:
        length: keys of the request, missing ones included.
        positions, pages, offsets: [num_keys] int64.
    """

    length: int
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor


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
    shape = (num_reqs, q_len, num_heads)
    if out is None:
        out = torch.empty((*shape, latent_dim), dtype=q.dtype)
    lse = torch.empty(shape, dtype=torch.float32) if return_lse else None
    keys = _prepare("mla.mla_decode", kv_cache, page_table, seq_lens, plan)
    for request in range(num_reqs):
        own_lse = None if lse is None else lse[request]
        _attend(q[request], kv_cache, keys[request], softmax_scale, causal, out[request], own_lse)
    return out if lse is None else (out, lse)


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
    starts = cu_seqlens_q.tolist()
    check_lengths("mla.mla_extend", starts, q.shape[0], "cu_seqlens_q")
    if out is None:
        out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    keys = _prepare("mla.mla_extend", kv_cache, page_table, seq_lens, plan)
    for request, own_keys in enumerate(keys):
        rows = slice(starts[request], starts[request + 1])
        own_lse = None if lse is None else lse[rows]
        _attend(q[rows], kv_cache, own_keys, softmax_scale, causal, out[rows], own_lse)
    return out if lse is None else (out, lse)


def _prepare(
    op: str, kv_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, plan: AttentionPlan | None
) -> list[_Keys]:
    """Find every request's keys, or take what an earlier layer of the step found."""
    num_pages, page_size, _ = kv_cache.shape

    def build() -> list[_Keys]:
        lengths = seq_lens.tolist()
        if lengths and max(lengths) > page_table.shape[1] * page_size:
            raise ShapeError(
                op,
                expected=f"seq_lens <= max_pages * page_size = {page_table.shape[1] * page_size}",
                got=str(max(lengths)),
                fix="give the page table a column for every page of the longest request",
            )
        found = []
        for row, length in zip(page_table.long(), lengths, strict=True):
            positions = torch.arange(max(length, 0))
            columns = torch.div(positions, page_size, rounding_mode="floor")
            pages = row[columns]
            there = ((pages >= 0) & (pages < num_pages)).nonzero().squeeze(1)
            if len(there) < length:
                positions, columns, pages = positions[there], columns[there], pages[there]
            found.append(_Keys(length, positions, pages, positions - columns * page_size))
        return found

    return build() if plan is None else plan.prepared(("cpu_mla", num_pages), build)


def _attend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    keys: _Keys,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """One request: q [n, H, width], out [n, H, latent_dim], lse [n, H]."""
    num_queries, num_heads, width = q.shape
    if num_queries == 0:
        return
    dtype, latent_dim = compute_dtype(q.dtype), out.shape[-1]
    queries = q.to(dtype).reshape(num_queries * num_heads, width) * softmax_scale
    softmax = RunningSoftmax(1, num_queries * num_heads, latent_dim, dtype)
    step = max(1, _BLOCK_LOGITS // (_BLOCK_KEYS * num_heads))  # queries
    first_position = keys.length - num_queries
    for start in range(0, len(keys.positions), _BLOCK_KEYS):
        block = slice(start, start + _BLOCK_KEYS)
        positions = keys.positions[block]
        rows = kv_cache[keys.pages[block], keys.offsets[block]]
        rows = unpack_rows(rows, latent_dim, dtype) if rows.dtype is torch.uint8 else rows.to(dtype)
        block_first, block_last = int(positions[0]), int(positions[-1])
        # Queries before the block's first key see nothing of it.
        begin = max(0, block_first - first_position) if causal else 0
        for query in range(begin, num_queries, step):
            end = min(query + step, num_queries)
            mine = slice(query * num_heads, end * num_heads)
            logits = (queries[mine] @ rows.t()).unsqueeze(0)
            if causal and first_position + query < block_last:
                own = torch.arange(first_position + query, first_position + end)[:, None, None]
                logits.view(end - query, num_heads, -1).masked_fill_(positions > own, -math.inf)
            softmax.add(mine, logits, rows[:, :latent_dim].unsqueeze(0))
    outputs, total = softmax.finish()
    out.copy_(outputs.view(num_queries, num_heads, latent_dim))
    if lse is not None:
        lse.copy_(total.view(num_queries, num_heads))

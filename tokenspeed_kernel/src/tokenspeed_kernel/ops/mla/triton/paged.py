"""Attention over a paged latent cache, in Triton: queries and heads are rows of a tile that share its keys.

A program takes BLOCK_M rows (row = query * num_heads + head) of one request and one part of the keys that they see; the parts of a
row are merged afterwards. With one part there is nothing to merge and the first kernel writes the result.

Requests have q_len queries each (decode), or ragged ones (extend). Ragged tiles are dealt over the requests without any host
knowledge of their lengths: request r owns the tiles from cu_seqlens_q[r] * num_heads // BLOCK_M + r on, which leaves at most one
tile idle for each request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.triton.tuning import unit_columns
from tokenspeed_kernel.ops.mla.triton.merge import merge_parts
from tokenspeed_kernel.ops.mla.triton.tile import add_keys, add_keys_by_slices, finish_rows
from tokenspeed_kernel.ops.mla.triton.tuning import device_facts, latent_config, num_splits, packed_config

__all__ = ["mla_decode", "mla_extend"]


@triton.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "splits", "q_len", "pages_row", "lse_row"])
def _paged_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, pages_ptr, cu_q_ptr, lengths_ptr,
    num_reqs, num_pages, max_pages, scale, splits, q_len,
    q_req, q_token, q_head, kv_page, kv_token, out_req, out_token, out_head, out_split, lse_row, pages_row,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    if RAGGED:
        low, high = 0, num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_q_ptr + middle).to(tl.int64) * HEADS // BLOCK_M + middle <= tile:
                low = middle
            else:
                high = middle
        request = low + tl.zeros([], tl.int64)
        first_token = tl.load(cu_q_ptr + request).to(tl.int64)
        num_queries = (tl.load(cu_q_ptr + request + 1) - first_token).to(tl.int32)
        row_start = ((tile - (first_token * HEADS // BLOCK_M + request)) * BLOCK_M).to(tl.int32)
        q_ptr += first_token * q_token
        out_ptr += first_token * out_token
    else:
        tiles_per_request = tl.cdiv(q_len * HEADS, BLOCK_M)
        request = (tile // tiles_per_request).to(tl.int64)
        first_token = request * q_len
        num_queries = q_len
        row_start = tile % tiles_per_request * BLOCK_M
        q_ptr += request * q_req
        out_ptr += request * out_req
    if row_start < num_queries * HEADS:
        rows = row_start + tl.arange(0, BLOCK_M)
        query, head = rows // HEADS, rows % HEADS
        live = query < num_queries
        query = query.to(tl.int64)
        length = tl.load(lengths_ptr + request)
        pages_ptr += request * pages_row
        positions = length - num_queries + rows // HEADS
        q_rows = q_ptr + query * q_token + head * q_head
        last_key = tl.minimum(length, max_pages * PAGE_SIZE)
        if CAUSAL:
            last_query = tl.minimum((row_start + BLOCK_M - 1) // HEADS, num_queries - 1)
            last_key = tl.minimum(last_key, length - num_queries + last_query + 1)
        last_key = tl.maximum(last_key, 0)
        tiles_per_split = tl.cdiv(tl.cdiv(last_key, BLOCK_N), splits)
        begin = split * tiles_per_split * BLOCK_N
        end = tl.minimum(last_key, begin + tiles_per_split * BLOCK_N)
        rows_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        rows_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
        value_dims = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        if CHUNK == 0:  # whole rows; there is one slice of values
            dims, rope_dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
            q_latent = tl.load(q_rows[:, None] + dims[None, :], mask=live[:, None] & (dims < LATENT)[None, :], other=0.0)
            rope_mask = live[:, None] & (rope_dims < ROPE)[None, :]
            q_rope = tl.load(q_rows[:, None] + LATENT + rope_dims[None, :], mask=rope_mask, other=0.0)
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page: its address is a scalar
                page = tl.load(pages_ptr + start // PAGE_SIZE)
                valid = keys < tl.where((page >= 0) & (page < num_pages), last_key, start)
            else:
                valid = keys < last_key
                page = tl.load(pages_ptr + keys // PAGE_SIZE, mask=valid, other=-1)
                valid = valid & (page >= 0) & (page < num_pages)
            # page * stride passes 2**31 elements in a large pool
            kv_rows = page.to(tl.int64) * kv_page + (keys % PAGE_SIZE).to(tl.int64) * kv_token
            seen = valid[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= positions[:, None])
            if CHUNK == 0:
                rows_max, rows_sum, acc = add_keys(
                    q_latent, q_rope, rows_max, rows_sum, acc, kv_ptr, kv_rows, valid, seen, scale,
                    LATENT, ROPE, BLOCK_L, BLOCK_R,
                )  # fmt: skip
            else:
                rows_max, rows_sum, acc = add_keys_by_slices(
                    q_rows, live, rows_max, rows_sum, acc, kv_ptr, kv_rows, valid, seen, scale, value_dims,
                    LATENT, ROPE, CHUNK, BLOCK_M, BLOCK_N,
                )  # fmt: skip
        out, lse = finish_rows(rows_max, rows_sum, acc)
        target = out_ptr + query * out_token + head * out_head + split * out_split
        mask = live[:, None] & (value_dims < LATENT)[None, :]
        tl.store(target[:, None] + value_dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
        if LSE:
            lse_rows = lse_ptr + ((first_token + query) * HEADS + head) * lse_row + split
            tl.store(lse_rows, lse, mask=live)  # every slice of values has the same


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
    """See `tokenspeed_kernel.ops.mla.mla_decode`."""
    num_reqs, q_len, num_heads, _ = q.shape
    if out is None:
        out = torch.empty((num_reqs, q_len, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_reqs, q_len, num_heads), dtype=torch.float32, device=q.device) if return_lse else None
    if num_reqs > 0 and q_len > 0:
        _launch(
            q, kv_cache, page_table, None, seq_lens, q_len, q_len, num_reqs * q_len, max_seqlen_k, softmax_scale, causal,
            out, lse, q.stride()[:3], out.stride()[:3], plan,
        )  # fmt: skip
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
    """See `tokenspeed_kernel.ops.mla.mla_extend`."""
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = torch.empty((num_tokens, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device) if return_lse else None
    if num_tokens > 0 and seq_lens.shape[0] > 0:
        _launch(
            q, kv_cache, page_table, cu_seqlens_q, seq_lens, 1, max_seqlen_q, num_tokens, max_seqlen_k, softmax_scale, causal,
            out, lse, (0, *q.stride()[:2]), (0, *out.stride()[:2]), plan,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def _launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    q_len: int,
    max_seqlen_q: int,
    num_tokens: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    plan: AttentionPlan | None,
) -> None:
    num_heads, width = q.shape[-2:]
    latent_dim = out.shape[-1]
    num_pages, page_size, _ = kv_cache.shape
    num_reqs = seq_lens.shape[0]
    page_table, seq_lens = unit_columns(page_table), seq_lens.contiguous()
    cu_seqlens_q = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    facts = device_facts(q.device)
    rows = max_seqlen_q * num_heads
    config = latent_config(q.dtype, latent_dim, width - latent_dim, rows, max_seqlen_k, page_size, facts)
    if kv_cache.dtype is torch.uint8:
        config = packed_config(config, facts)
    if cu_seqlens_q is None:
        tiles = num_reqs * triton.cdiv(q_len * num_heads, config.block_m)
    else:
        tiles = num_tokens * num_heads // config.block_m + num_reqs
    slices = triton.cdiv(latent_dim, config.block_v)
    splits = num_splits(tiles * slices, max_seqlen_k, config, facts)
    num_rows = num_tokens * num_heads
    first_out, first_lse, first_strides, out_split = out, lse, out_strides, 0
    if splits > 1:
        shape = (num_rows, splits, latent_dim)

        def build() -> tuple[torch.Tensor, torch.Tensor]:
            parts = torch.empty(shape, dtype=torch.float32, device=q.device)
            return parts, torch.empty(shape[:2], dtype=torch.float32, device=q.device)

        # All layers of a step may write their partial results to one place: each is merged before the next begins.
        first_out, first_lse = build() if plan is None else plan.prepared(("triton_mla", shape), build)
        head = splits * latent_dim
        first_strides, out_split = (q_len * num_heads * head, num_heads * head, head), latent_dim
    _paged_kernel[(tiles, splits, slices)](
        q, kv_cache, first_out, first_out if first_lse is None else first_lse, page_table,
        seq_lens if cu_seqlens_q is None else cu_seqlens_q, seq_lens,
        num_reqs, num_pages, page_table.shape[1], float(softmax_scale), splits, q_len,
        *q_strides, *kv_cache.stride()[:2], *first_strides, out_split, splits, page_table.stride(0),
        HEADS=num_heads, LATENT=latent_dim, ROPE=width - latent_dim, BLOCK_L=config.block_l, BLOCK_R=config.block_r,
        BLOCK_V=config.block_v, CHUNK=config.chunk, BLOCK_M=config.block_m, BLOCK_N=config.block_n, PAGE_SIZE=page_size,
        RAGGED=cu_seqlens_q is not None, CAUSAL=causal, LSE=first_lse is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        assert first_lse is not None
        ragged = cu_seqlens_q is not None
        strides = (out_strides[1], 0, out_strides[2]) if ragged else out_strides
        merge_parts(first_out, first_lse, out, lse, 1 if ragged else q_len, strides)

"""Scores of the indexer, in Triton: a program takes a tile of keys and some queries of one request.

The keys of a tile are read once, and each query's heads are rows of a product with them; the heads' scores are summed at once, so
that nothing but the result is written. Programs beyond a request's keys fill their part of the result with -inf. Queries are dealt
over the requests without any host knowledge of their lengths: request r owns the blocks from cu_seqlens_q[r] // BLOCK_Q + r on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.triton.tuning import unit_columns
from tokenspeed_kernel.ops.mla.triton.tuning import power_of_two

__all__ = ["indexer_config", "indexer_scores", "indexer_scores_ragged"]

# Ragged keys are one page without end: a multiple of every tile.
_NO_PAGES = 1 << 16
_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "num_columns", "pages_row"])
def _indexer_kernel(
    q_ptr, weights_ptr, k_ptr, scale_ptr, out_ptr, pages_ptr, cu_q_ptr, lengths_ptr,
    num_reqs, num_pages, max_pages, num_columns,
    q_token, q_head, weights_token, weights_head, k_page, k_token, scale_page, scale_token, out_token, pages_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    low, high = 0, num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    request = low + tl.zeros([], tl.int64)
    first_token = tl.load(cu_q_ptr + request)
    num_queries = tl.load(cu_q_ptr + request + 1) - first_token
    first_query = (block - (first_token // BLOCK_Q + request)).to(tl.int32) * BLOCK_Q
    if first_query < num_queries:
        keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        if PAGED:
            length = tl.load(lengths_ptr + request)
            last_key = tl.minimum(length, max_pages * PAGE_SIZE)
            valid = keys < last_key
            page = tl.load(pages_ptr + request * pages_row + keys // PAGE_SIZE, mask=valid, other=-1)
            valid = valid & (page >= 0) & (page < num_pages)
            page = page.to(tl.int64)  # page * stride passes 2**31 elements in a large pool
            offset = (keys % PAGE_SIZE).to(tl.int64)
            rows = page * k_page + offset * k_token
            scale_rows = page * scale_page + offset * scale_token
        else:
            begin = tl.load(lengths_ptr + request)
            length = tl.load(lengths_ptr + request + 1) - begin
            valid = keys < length
            rows = (begin + keys).to(tl.int64) * k_token
            scale_rows = (begin + keys).to(tl.int64) * scale_token
        if SCALED:
            scale = tl.load(scale_ptr + scale_rows, mask=valid, other=0.0)
        dims = tl.arange(0, CHUNK)
        heads = tl.arange(0, BLOCK_H)
        if CHUNK >= DIM:
            k_mask = valid[:, None] & (dims < DIM)[None, :]
            k = tl.load((k_ptr + rows)[:, None] + dims[None, :], mask=k_mask, other=0.0).to(DOT)
        for query in range(first_query, tl.minimum(first_query + BLOCK_Q, num_queries)):
            token = (first_token + query).to(tl.int64)
            q_rows = (q_ptr + token * q_token + heads.to(tl.int64) * q_head)[:, None]
            live = (heads < HEADS)[:, None]
            if CHUNK >= DIM:
                q = tl.load(q_rows + dims[None, :], mask=live & (dims < DIM)[None, :], other=0.0).to(DOT)
                logits = tl.dot(q, tl.trans(k), input_precision="ieee")
            else:
                logits = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
                for start in range(0, DIM, CHUNK):
                    inside = (start + dims < DIM)[None, :]
                    q = tl.load(q_rows + start + dims[None, :], mask=live & inside, other=0.0).to(DOT)
                    k_part = tl.load((k_ptr + rows)[:, None] + start + dims[None, :], mask=valid[:, None] & inside, other=0.0)
                    logits = tl.dot(q, tl.trans(k_part.to(DOT)), logits, input_precision="ieee")
            weights = tl.load(weights_ptr + token * weights_token + heads * weights_head, mask=heads < HEADS, other=0.0)
            scores = tl.sum(tl.maximum(logits, 0.0) * weights[:, None], 0)
            if SCALED:
                scores *= scale
            seen = valid
            if CAUSAL:
                seen = seen & (keys <= length - num_queries + query)
            tl.store(out_ptr + token * out_token + keys, tl.where(seen, scores, float("-inf")), mask=keys < num_columns)


def indexer_config(dtype: torch.dtype, num_heads: int, dim: int, max_seqlen_k: int, fp8: bool) -> dict[str, int]:
    """Tiles and how a program runs, for products of that dtype; fp8 keys take registers to be converted."""
    block_h = power_of_two(num_heads, 16, 1024)
    if dtype == torch.float32:  # no matrix units with IEEE products: registers hold whole operands
        chunk, block_q, block_n = min(power_of_two(dim, 16, 1024), 32), 4, 16
        num_warps, num_stages = 4 if block_h <= 64 else 8, 1
    else:
        chunk, block_q = power_of_two(dim, 16, 1024), 8
        block_n = power_of_two(max_seqlen_k, 16, 128 if block_h <= 64 and not fp8 else 64)
        num_warps, num_stages = 4, 2
    tiles = {"BLOCK_H": block_h, "CHUNK": chunk, "BLOCK_Q": block_q, "BLOCK_N": block_n}
    return {**tiles, "num_warps": num_warps, "num_stages": num_stages}


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
    """See `tokenspeed_kernel.ops.dsa.indexer_scores`."""
    strides = (k_cache.stride(0), k_cache.stride(1))
    return _launch(q, weights, k_cache, strides, page_table, cu_seqlens_q, seq_lens, max_seqlen_k, k_scale, causal, out)


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
    """See `tokenspeed_kernel.ops.dsa.indexer_scores_ragged`."""
    return _launch(q, weights, k, (0, k.stride(0)), None, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, k_scale, causal, out)


def _launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_strides: tuple[int, int],
    page_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None,
    causal: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, num_heads, dim = q.shape
    num_reqs = cu_seqlens_q.shape[0] - 1
    if out is None:
        out = torch.empty((num_tokens, max_seqlen_k), dtype=torch.float32, device=q.device)
    if num_tokens == 0 or max_seqlen_k == 0 or num_reqs == 0:
        return out
    page_table = None if page_table is None else unit_columns(page_table)
    dtype = q.dtype
    if dtype is torch.float8_e4m3fn:
        # Exact in bf16, whose products every device has. (The interpreter's bf16 products are wrong: float32 there.)
        dtype = torch.float32 if q.device.type == "cpu" else torch.bfloat16
    config = indexer_config(dtype, num_heads, dim, max_seqlen_k, k_scale is not None)
    blocks = num_tokens // config["BLOCK_Q"] + num_reqs
    if k_scale is None:
        scale_strides: tuple[int, ...] = (0, 0)
    else:
        scale_strides = k_scale.stride() if k_scale.dim() == 2 else (0, k_scale.stride(0))
    _indexer_kernel[(triton.cdiv(max_seqlen_k, config["BLOCK_N"]), blocks)](
        q, weights, k, weights if k_scale is None else k_scale, out, weights if page_table is None else page_table,
        cu_seqlens_q.contiguous(), lengths.contiguous(), num_reqs, k.shape[0] if page_table is not None else 0,
        0 if page_table is None else page_table.shape[1], max_seqlen_k,
        *q.stride()[:2], *weights.stride(), *k_strides, *scale_strides, out.stride(0),
        0 if page_table is None else page_table.stride(0),
        HEADS=num_heads, DIM=dim, PAGED=page_table is not None, PAGE_SIZE=_NO_PAGES if page_table is None else k.shape[1],
        CAUSAL=causal, SCALED=k_scale is not None, DOT=_DOT_DTYPES[dtype], **config,
    )  # fmt: skip
    return out

"""Attention of several queries a request, in Triton: tiles of queries stream over tiles of keys, paged or ragged.

The query heads that share a key head are folded into the rows of a tile (row = query * group + head of the group), so a key is
read once for all of them and short chunks still fill the matrix units. Tiles are dealt over the requests without any host
knowledge of their lengths: request r owns the tiles from cu_seqlens_q[r] * group // BLOCK_M + r on, which leaves at most one tile
idle for each request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.triton.tile import attend_keys, finish_rows
from tokenspeed_kernel.ops.attention.triton.tuning import extend_config, fp8_as_bytes, unit_columns

__all__ = ["mha_extend", "mha_prefill"]

# Ragged keys are one page without end: a multiple of every tile.
_NO_PAGES = 1 << 16


@triton.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "window", "pages_row"])
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, pages_ptr, cu_q_ptr, lengths_ptr,
    num_reqs, num_pages, max_pages, scale, cap, window,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head, lse_token, pages_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    # The last tiles of a causal request are the longest: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    low, high = 0, num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q_ptr + middle).to(tl.int64) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    request = low + tl.zeros([], tl.int64)
    first_row = tl.load(cu_q_ptr + request).to(tl.int64)
    num_queries = (tl.load(cu_q_ptr + request + 1) - first_row).to(tl.int32)
    row_start = ((tile - (first_row * GROUP // BLOCK_M + request)) * BLOCK_M).to(tl.int32)
    if row_start < num_queries * GROUP:
        if PAGED:
            length = tl.load(lengths_ptr + request)
            pages_ptr += request * pages_row
        else:
            begin = tl.load(lengths_ptr + request)
            length = tl.load(lengths_ptr + request + 1) - begin
            k_ptr += begin.to(tl.int64) * k_token
            v_ptr += begin.to(tl.int64) * v_token
        k_ptr += kv_head.to(tl.int64) * k_head
        v_ptr += kv_head.to(tl.int64) * v_head
        rows = row_start + tl.arange(0, BLOCK_M)
        query, head = rows // GROUP, kv_head * GROUP + rows % GROUP
        live = query < num_queries
        positions = length - num_queries + query
        dims = tl.arange(0, BLOCK_D)
        token = first_row + query
        q_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + dims[None, :], mask=q_mask, other=0.0)
        rows_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        rows_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        # Keys that some row of the tile sees are [first_key, last_key); all rows see [full_first, full_last).
        tile_first = length - num_queries + row_start // GROUP
        tile_last = length - num_queries + tl.minimum((row_start + BLOCK_M - 1) // GROUP, num_queries - 1)
        first_key, last_key = 0, length
        full_last = length
        if CAUSAL:
            last_key = tl.minimum(length, tile_last + 1)
            full_last = tl.minimum(length, tile_first + 1)
        if PAGED:
            last_key = tl.minimum(last_key, max_pages * PAGE_SIZE)
            full_last = tl.minimum(full_last, max_pages * PAGE_SIZE)
        full_first = 0
        if WINDOW:
            first_key = tl.maximum(0, tile_first - window + 1)
            full_first = tl.maximum(0, tile_last - window + 1)
        begin_block = first_key // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.cdiv(full_first, BLOCK_N) * BLOCK_N, tl.maximum(last_key, begin_block))
        full_end = tl.maximum(full_last // BLOCK_N * BLOCK_N, full_begin)
        ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
        if WINDOW:
            for start in range(begin_block, full_begin, BLOCK_N):
                rows_max, rows_sum, acc = attend_keys(
                    q, rows_max, rows_sum, acc, positions,
                    k_ptr, v_ptr, pages_ptr, start, first_key, last_key, num_pages,
                    k_page, k_token, v_page, v_token, dims, scale, cap, window,
                    PAGED, PAGE_SIZE, ONE_PAGE, CAUSAL, WINDOW, CAP, True, HEAD_DIM, BLOCK_D, BLOCK_N,
                )  # fmt: skip
        for start in range(full_begin, full_end, BLOCK_N):
            rows_max, rows_sum, acc = attend_keys(
                q, rows_max, rows_sum, acc, positions,
                k_ptr, v_ptr, pages_ptr, start, first_key, last_key, num_pages,
                k_page, k_token, v_page, v_token, dims, scale, cap, window,
                PAGED, PAGE_SIZE, ONE_PAGE, CAUSAL, WINDOW, CAP, False, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for start in range(full_end, last_key, BLOCK_N):
            rows_max, rows_sum, acc = attend_keys(
                q, rows_max, rows_sum, acc, positions,
                k_ptr, v_ptr, pages_ptr, start, first_key, last_key, num_pages,
                k_page, k_token, v_page, v_token, dims, scale, cap, window,
                PAGED, PAGE_SIZE, ONE_PAGE, CAUSAL, WINDOW, CAP, True, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        sinks = tl.zeros([BLOCK_M], dtype=tl.float32)
        if SINKS:
            sinks = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        out, lse = finish_rows(rows_max, rows_sum, acc, sinks, SINKS)
        target = out_ptr + (token * out_token + head * out_head)[:, None] + dims[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=q_mask)
        if LSE:
            tl.store(lse_ptr + token * lse_token + head, lse, mask=live)


def mha_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.mha_extend`."""
    return _launch(
        q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, k_cache.shape[1],
        (*k_cache.stride()[:3], *v_cache.stride()[:3]), max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, sliding_window, logit_cap, sinks, return_lse, out,
    )  # fmt: skip


def mha_prefill(
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
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.mha_prefill`."""
    return _launch(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, _NO_PAGES,
        (0, k.stride(0), k.stride(1), 0, v.stride(0), v.stride(1)), max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, sliding_window, logit_cap, sinks, return_lse, out,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    strides: tuple[int, ...],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    sliding_window: int | None,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[-2]
    group = num_heads // num_kv_heads
    num_reqs = cu_seqlens_q.shape[0] - 1
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A tensor that is not used still needs an address.
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device) if return_lse else q
    if num_tokens > 0 and num_reqs > 0:
        amd = torch.version.hip is not None
        cu_seqlens_q, lengths = cu_seqlens_q.contiguous(), lengths.contiguous()
        page_table = None if page_table is None else unit_columns(page_table)
        k, v = fp8_as_bytes(k), fp8_as_bytes(v)
        config = extend_config(q.dtype, head_dim, max_seqlen_q * group, max_seqlen_k, page_size, amd=amd)
        tiles = num_tokens * group // config.block_m + num_reqs
        _extend_kernel[(tiles, num_kv_heads)](
            q, k, v, out, lse, q if sinks is None else sinks, q if page_table is None else page_table, cu_seqlens_q, lengths,
            num_reqs, 0 if page_table is None else k.shape[0], 0 if page_table is None else page_table.shape[1],
            float(head_dim**-0.5 if softmax_scale is None else softmax_scale), float(logit_cap or 0), sliding_window or 0,
            q.stride(0), q.stride(1), *strides, out.stride(0), out.stride(1), num_heads,
            0 if page_table is None else page_table.stride(0),
            GROUP=group, HEAD_DIM=head_dim, BLOCK_D=config.block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            PAGED=page_table is not None, PAGE_SIZE=page_size, CAUSAL=causal, WINDOW=sliding_window is not None,
            CAP=logit_cap is not None, SINKS=sinks is not None, LSE=return_lse,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return (out, lse) if return_lse else out

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
from tokenspeed_kernel.ops.mla.triton.tuning import device_facts, power_of_two

__all__ = ["indexer_config", "indexer_scores", "indexer_scores_ragged"]

# Ragged keys are one page without end: a multiple of every tile.
_NO_PAGES = 1 << 16
_DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit
def _locate(
    keys, request, lengths_ptr, pages_ptr, num_pages, max_pages, k_page, k_token, scale_page, scale_token, pages_row,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """(which keys are there, where they begin, where their scales lie); 64-bit, because a pool passes 2**31 elements."""
    if PAGED:
        valid = keys < tl.minimum(tl.load(lengths_ptr + request), max_pages * PAGE_SIZE)
        page = tl.load(pages_ptr + request * pages_row + keys // PAGE_SIZE, mask=valid, other=-1)
        valid = valid & (page >= 0) & (page < num_pages)
        page = page.to(tl.int64)
        offset = (keys % PAGE_SIZE).to(tl.int64)
        rows = page * k_page + offset * k_token
        scale_rows = page * scale_page + offset * scale_token
    else:
        begin = tl.load(lengths_ptr + request)
        valid = keys < tl.load(lengths_ptr + request + 1) - begin
        rows = (begin + keys).to(tl.int64) * k_token
        scale_rows = (begin + keys).to(tl.int64) * scale_token
    return valid, rows, scale_rows


@triton.jit
def _length_of(lengths_ptr, request, PAGED: tl.constexpr):
    length = tl.load(lengths_ptr + request)
    return length if PAGED else tl.load(lengths_ptr + request + 1) - length


@triton.jit
def _add_heads(logits, weights, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr):
    """Scores [BLOCK_N, GROUP] of [BLOCK_N, GROUP * BLOCK_H] products."""
    weighted = tl.maximum(logits, 0.0) * weights[None, :]
    if GROUP == 1:
        return tl.sum(weighted, 1)[:, None]
    return tl.sum(tl.reshape(weighted, [BLOCK_N, GROUP, BLOCK_H]), 2)


@triton.jit
def _store_scores(
    out_ptr, scores, valid, keys, position, first_token, query, last_query, columns, out_token,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    queries = query + tl.arange(0, GROUP)
    seen = valid[:, None]
    if CAUSAL:
        seen = seen & (keys[:, None] <= position + queries[None, :])
    target = out_ptr + (first_token + queries).to(tl.int64)[None, :] * out_token + keys[:, None]
    tl.store(target, tl.where(seen, scores, float("-inf")), mask=columns[:, None] & (queries <= last_query)[None, :])


@triton.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "num_columns", "pages_row"])
def _indexer_kernel(
    q_ptr, weights_ptr, k_ptr, scale_ptr, out_ptr, pages_ptr, cu_q_ptr, lengths_ptr,
    num_reqs, num_pages, max_pages, num_columns,
    q_token, q_head, weights_token, weights_head, k_page, k_token, scale_page, scale_token, out_token, pages_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A tile of keys against BLOCK_Q queries, GROUP of them at a time."""
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
        length = _length_of(lengths_ptr, request, PAGED)
        position = length - num_queries  # of the request's first query
        last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
        first_key = tl.program_id(0) * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        columns = keys < num_columns
        if (first_key >= length) | (CAUSAL & (first_key > position + last_query)):
            unseen = tl.full([BLOCK_N], float("-inf"), dtype=tl.float32)
            for query in range(first_query, last_query + 1):
                tl.store(out_ptr + (first_token + query).to(tl.int64) * out_token + keys, unseen, mask=columns)
        else:
            valid, rows, scale_rows = _locate(
                keys, request, lengths_ptr, pages_ptr, num_pages, max_pages, k_page, k_token, scale_page, scale_token, pages_row,
                PAGED, PAGE_SIZE,
            )  # fmt: skip
            if SCALED:
                scale = tl.load(scale_ptr + scale_rows, mask=valid, other=0.0)
            dims = tl.arange(0, CHUNK)
            rows_of_q = tl.arange(0, GROUP * BLOCK_H)
            heads = rows_of_q % BLOCK_H
            if CHUNK >= DIM:
                k_mask = valid[:, None] & (dims < DIM)[None, :]
                k = tl.load((k_ptr + rows)[:, None] + dims[None, :], mask=k_mask, other=0.0).to(DOT)
            for query in range(first_query, last_query + 1, GROUP):
                of_row = query + rows_of_q // BLOCK_H
                live = (heads < HEADS) & (of_row <= last_query)
                tokens = (first_token + of_row).to(tl.int64)
                q_rows = (q_ptr + tokens * q_token + heads.to(tl.int64) * q_head)[:, None]
                weights = tl.load(weights_ptr + tokens * weights_token + heads * weights_head, mask=live, other=0.0)
                # Keys lie along the rows, so that the sum over heads stays within a thread and its neighbours.
                if CHUNK >= DIM:
                    q = tl.load(q_rows + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(DOT)
                    logits = tl.dot(k, tl.trans(q), input_precision="ieee")
                else:
                    logits = tl.zeros([BLOCK_N, GROUP * BLOCK_H], dtype=tl.float32)
                    for start in range(0, DIM, CHUNK):
                        inside = (start + dims < DIM)[None, :]
                        q = tl.load(q_rows + start + dims[None, :], mask=live[:, None] & inside, other=0.0).to(DOT)
                        k_part = tl.load((k_ptr + rows)[:, None] + start + dims[None, :], mask=valid[:, None] & inside, other=0.0)
                        logits = tl.dot(k_part.to(DOT), tl.trans(q), logits, input_precision="ieee")
                scores = _add_heads(logits, weights, BLOCK_N, GROUP, BLOCK_H)
                if SCALED:
                    scores *= scale[:, None]
                _store_scores(
                    out_ptr, scores, valid, keys, position, first_token, query, last_query, columns, out_token, GROUP, CAUSAL
                )


@triton.jit(do_not_specialize=["num_pages", "max_pages", "num_columns", "pages_row"])
def _few_queries_kernel(
    q_ptr, weights_ptr, k_ptr, scale_ptr, out_ptr, pages_ptr, cu_q_ptr, lengths_ptr, num_pages, max_pages, num_columns,
    q_token, q_head, weights_token, weights_head, k_page, k_token, scale_page, scale_token, out_token, pages_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """All queries of a request, at most GROUP, against TILES tiles of its keys, one after the other."""
    request = tl.program_id(1).to(tl.int64)
    first_token = tl.load(cu_q_ptr + request)
    num_queries = tl.load(cu_q_ptr + request + 1) - first_token
    if num_queries > 0:
        length = _length_of(lengths_ptr, request, PAGED)
        dims = tl.arange(0, CHUNK)
        rows_of_q = tl.arange(0, GROUP * BLOCK_H)
        heads, of_row = rows_of_q % BLOCK_H, rows_of_q // BLOCK_H
        live = (heads < HEADS) & (of_row < num_queries)
        tokens = (first_token + of_row).to(tl.int64)
        weights = tl.load(weights_ptr + tokens * weights_token + heads * weights_head, mask=live, other=0.0)
        q_rows = (q_ptr + tokens * q_token + heads.to(tl.int64) * q_head)[:, None]
        q = tl.load(q_rows + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(DOT)
        begin = tl.program_id(0) * TILES * BLOCK_N
        end = tl.minimum(begin + TILES * BLOCK_N, num_columns)
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            valid, rows, scale_rows = _locate(
                keys, request, lengths_ptr, pages_ptr, num_pages, max_pages, k_page, k_token, scale_page, scale_token, pages_row,
                PAGED, PAGE_SIZE,
            )  # fmt: skip
            k = tl.load((k_ptr + rows)[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
            logits = tl.dot(k.to(DOT), tl.trans(q), input_precision="ieee")
            scores = _add_heads(logits, weights, BLOCK_N, GROUP, BLOCK_H)
            if SCALED:
                scores *= tl.load(scale_ptr + scale_rows, mask=valid, other=0.0)[:, None]
            _store_scores(
                out_ptr, scores, valid, keys, length - num_queries, first_token, 0, num_queries - 1, keys < num_columns, out_token,
                GROUP, CAUSAL,
            )  # fmt: skip


def indexer_config(dtype: torch.dtype, num_heads: int, dim: int, max_seqlen_k: int, fp8: bool, major: int = 0) -> dict[str, int]:
    """Tiles and how a program runs, for products of that dtype; fp8 keys take registers to be converted.

    Those for fp8, and for bf16 on sm_90 (``major`` 9), are of perf/baselines/h200/hopper.dsa.txt.
    """
    block_h = power_of_two(num_heads, 16, 1024)
    if dtype == torch.float32:  # no matrix units with IEEE products: registers hold whole operands
        chunk, block_q, block_n = min(power_of_two(dim, 16, 1024), 32), 4, 16
        num_warps, num_stages = 4 if block_h <= 64 else 8, 1
    elif dtype == torch.float8_e4m3fn:
        chunk, block_q, block_n = power_of_two(dim, 32, 1024), 64, power_of_two(max_seqlen_k, 64, 128)
        num_warps, num_stages = 4, 4
    elif major == 9 and not fp8 and block_h <= 64 and dim <= 128 and max_seqlen_k > 128:
        chunk, block_q, block_n = power_of_two(dim, 16, 1024), 32, 256
        num_warps, num_stages = 8, 3
    else:
        chunk, block_q = power_of_two(dim, 16, 1024), 8
        block_n = power_of_two(max_seqlen_k, 16, 128 if block_h <= 64 and not fp8 else 64)
        num_warps, num_stages = 4, 2
    tiles = {"BLOCK_H": block_h, "CHUNK": chunk, "BLOCK_Q": block_q, "GROUP": 1, "BLOCK_N": block_n}
    return {**tiles, "num_warps": num_warps, "num_stages": num_stages}


def few_queries_config(
    config: dict[str, int], max_seqlen_q: int, max_seqlen_k: int, num_reqs: int, processors: int
) -> dict[str, int] | None:
    """The same for requests of few queries; None where there are more."""
    group = power_of_two(max_seqlen_q, 1, 8)
    if max_seqlen_q > group or group * config["BLOCK_H"] > 256:
        return None
    block_n = min(config["BLOCK_N"], 64 if group * config["BLOCK_H"] > 128 else 128)
    # Some programs on each processor; a longer run of keys has its next tiles on their way meanwhile.
    tiles = max(1, min(8, max_seqlen_k * num_reqs // (block_n * 4 * processors)))
    tiles = 1 << (tiles.bit_length() - 1)
    names = ("BLOCK_H", "CHUNK")
    return {
        **{name: config[name] for name in names},
        "GROUP": group,
        "TILES": tiles,
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": 3,
    }


def _has_fp8_products(device: torch.device, dim: int) -> bool:
    """Where products of fp8 were measured faster than of bf16; the matrix units take at least 32 elements of a head."""
    return dim >= 32 and device_facts(device).major == 9


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
    return _launch(
        q, weights, k_cache, strides, page_table, cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k, k_scale, causal, out
    )


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
    return _launch(
        q, weights, k, (0, k.stride(0)), None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, k_scale, causal, out
    )


def _launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_strides: tuple[int, int],
    page_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    max_seqlen_q: int,
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
    if dtype is torch.float8_e4m3fn and not _has_fp8_products(q.device, dim):
        # Exact in bf16, whose products every device has. (The interpreter's bf16 products are wrong: float32 there.)
        dtype = torch.float32 if q.device.type == "cpu" else torch.bfloat16
    facts = device_facts(q.device)
    config = indexer_config(dtype, num_heads, dim, max_seqlen_k, k_scale is not None, facts.major)
    if k_scale is None:
        scale_strides: tuple[int, ...] = (0, 0)
    else:
        scale_strides = k_scale.stride() if k_scale.dim() == 2 else (0, k_scale.stride(0))
    operands = (
        q, weights, k, weights if k_scale is None else k_scale, out, weights if page_table is None else page_table,
        cu_seqlens_q.contiguous(), lengths.contiguous(),
    )  # fmt: skip
    sizes = (k.shape[0] if page_table is not None else 0, 0 if page_table is None else page_table.shape[1], max_seqlen_k)
    strides = (*q.stride()[:2], *weights.stride(), *k_strides, *scale_strides, out.stride(0))
    pages_row = 0 if page_table is None else page_table.stride(0)
    constants = {
        "HEADS": num_heads,
        "DIM": dim,
        "PAGED": page_table is not None,
        "PAGE_SIZE": _NO_PAGES if page_table is None else k.shape[1],
        "CAUSAL": causal,
        "SCALED": k_scale is not None,
        "DOT": _DOT_DTYPES[dtype],
    }
    few = few_queries_config(config, max_seqlen_q, max_seqlen_k, num_reqs, facts.processors)
    if few is not None and config["CHUNK"] >= dim:
        grid = (triton.cdiv(max_seqlen_k, few["TILES"] * few["BLOCK_N"]), num_reqs)
        _few_queries_kernel[grid](*operands, *sizes, *strides, pages_row, **constants, **few)
    else:
        grid = (triton.cdiv(max_seqlen_k, config["BLOCK_N"]), num_tokens // config["BLOCK_Q"] + num_reqs)
        _indexer_kernel[grid](*operands, num_reqs, *sizes, *strides, pages_row, **constants, **config)
    return out

"""Attention of ragged queries to ragged expanded keys, in Triton: tiles of queries stream over tiles of keys.

A head of 192 elements is taken as 128 and 64: a tile's dimensions are powers of two, and padding 192 to 256 would waste a quarter
of the products. Query heads that share a key head are folded into a tile's rows (row = query * group + head of the group). Tiles
are dealt over the requests as in `paged`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.mla.triton.tile import finish_rows, update_softmax
from tokenspeed_kernel.ops.mla.triton.tuning import device_facts, prefill_config

__all__ = ["mla_prefill"]


@triton.jit
def _add_tile(
    q, q_rest, rows_max, rows_sum, acc, positions, k_ptr, v_ptr, start, last_key, k_token, v_token, value_start, scale,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add keys [start, start + BLOCK_N). EDGE says that they may pass last_key, or that some row does not see them all."""
    keys = start + tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    valid = keys < last_key
    k_rows = (k_ptr + keys.to(tl.int64) * k_token)[:, None]
    v_rows = (v_ptr + keys.to(tl.int64) * v_token)[:, None]
    k_mask = (dims < HEAD_DIM)[None, :]
    v_mask = (value_start + value_dims < VALUE_DIM)[None, :]
    if EDGE:
        k_mask = k_mask & valid[:, None]
        v_mask = v_mask & valid[:, None]
    k = tl.load(k_rows + dims[None, :], mask=k_mask, other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if BLOCK_E > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_E)
        rest_mask = (rest < HEAD_DIM)[None, :]
        if EDGE:
            rest_mask = rest_mask & valid[:, None]
        k_rest = tl.load(k_rows + rest[None, :], mask=rest_mask, other=0.0)
        logits = tl.dot(q_rest, tl.trans(k_rest), logits, input_precision="ieee")
    seen = (keys >= 0)[None, :]
    if EDGE:
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= positions[:, None])
    weights, shrink, rows_max, rows_sum = update_softmax(logits, seen, scale, rows_max, rows_sum)
    v = tl.load(v_rows + value_dims[None, :], mask=v_mask, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return rows_max, rows_sum, acc


@triton.jit(do_not_specialize=["num_reqs"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, num_reqs, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, lse_token,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    # The last tiles of a causal request are the longest: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    value_start = tl.program_id(2) * BLOCK_V
    low, high = 0, num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q_ptr + middle).to(tl.int64) * GROUP // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    request = low + tl.zeros([], tl.int64)
    first_token = tl.load(cu_q_ptr + request).to(tl.int64)
    num_queries = (tl.load(cu_q_ptr + request + 1) - first_token).to(tl.int32)
    row_start = ((tile - (first_token * GROUP // BLOCK_M + request)) * BLOCK_M).to(tl.int32)
    if row_start < num_queries * GROUP:
        first_key = tl.load(cu_k_ptr + request)
        length = tl.load(cu_k_ptr + request + 1) - first_key
        k_ptr += first_key.to(tl.int64) * k_token + kv_head * k_head
        v_ptr += first_key.to(tl.int64) * v_token + kv_head * v_head + value_start
        rows = row_start + tl.arange(0, BLOCK_M)
        query, head = rows // GROUP, kv_head * GROUP + rows % GROUP
        live = query < num_queries
        positions = length - num_queries + query
        token = first_token + query
        dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        q_rows = (q_ptr + token * q_token + head * q_head)[:, None]
        q = tl.load(q_rows + dims[None, :], mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        q_rest = q
        if BLOCK_E > 0:
            rest = BLOCK_D + tl.arange(0, BLOCK_E)
            q_rest = tl.load(q_rows + rest[None, :], mask=live[:, None] & (rest < HEAD_DIM)[None, :], other=0.0)
        rows_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        rows_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
        # Keys that some row of the tile sees end at last_key; all rows see those before full_last.
        last_key, full_last = length, length
        if CAUSAL:
            last_query = tl.minimum((row_start + BLOCK_M - 1) // GROUP, num_queries - 1)
            last_key = tl.minimum(length, length - num_queries + last_query + 1)
            full_last = tl.minimum(length, length - num_queries + row_start // GROUP + 1)
        full_end = tl.maximum(full_last // BLOCK_N * BLOCK_N, 0)
        for start in range(0, full_end, BLOCK_N):
            rows_max, rows_sum, acc = _add_tile(
                q, q_rest, rows_max, rows_sum, acc, positions, k_ptr, v_ptr, start, last_key, k_token, v_token, value_start, scale,
                CAUSAL, False, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_V, BLOCK_N,
            )  # fmt: skip
        for start in range(full_end, last_key, BLOCK_N):
            rows_max, rows_sum, acc = _add_tile(
                q, q_rest, rows_max, rows_sum, acc, positions, k_ptr, v_ptr, start, last_key, k_token, v_token, value_start, scale,
                CAUSAL, True, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_E, BLOCK_V, BLOCK_N,
            )  # fmt: skip
        out, lse = finish_rows(rows_max, rows_sum, acc)
        target = out_ptr + token * out_token + head * out_head + value_start
        mask = live[:, None] & (value_start + value_dims < VALUE_DIM)[None, :]
        tl.store(target[:, None] + value_dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
        if LSE:
            tl.store(lse_ptr + token * lse_token + head, lse, mask=live)  # every slice of values has the same


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
    """See `tokenspeed_kernel.ops.mla.mla_prefill`."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, value_dim = v.shape
    group, num_reqs = num_heads // num_kv_heads, cu_seqlens_q.shape[0] - 1
    if out is None:
        out = torch.empty((num_tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
    # A tensor that is not used still needs an address.
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device) if return_lse else q
    if num_tokens > 0 and num_reqs > 0:
        config = prefill_config(q.dtype, head_dim, value_dim, max_seqlen_q * group, max_seqlen_k, device_facts(q.device))
        tiles = num_tokens * group // config.block_m + num_reqs
        _prefill_kernel[(tiles, num_kv_heads, triton.cdiv(value_dim, config.block_v))](
            q, k, v, out, lse, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), num_reqs,
            float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], num_heads,
            GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=config.block_d, BLOCK_E=config.block_e,
            BLOCK_V=config.block_v, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CAUSAL=causal, LSE=return_lse,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return (out, lse) if return_lse else out

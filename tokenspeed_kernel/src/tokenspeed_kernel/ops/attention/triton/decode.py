"""Attention of one query a request, in Triton: keys are split over programs, and their partial softmaxes merged.

A program takes the query heads of one key head (as rows of its tile) and one part of a request's keys. Each request is cut into
the same number of parts, of its own length / parts, so that long and short requests end together. With one part there is nothing
to merge and the first kernel writes the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.triton.processors import num_processors
from tokenspeed_kernel.ops.attention.triton.tile import attend_keys, finish_rows
from tokenspeed_kernel.ops.attention.triton.tuning import decode_config, fp8_as_bytes, num_splits, unit_columns

__all__ = ["mha_decode"]



@triton.jit(do_not_specialize=["num_pages", "max_pages", "window", "pages_row", "splits"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, pages_ptr, lengths_ptr,
    num_pages, max_pages, scale, cap, window, splits,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    out_token, out_head, out_split, lse_token, lse_head, pages_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    num_blocks: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // num_blocks
    split = tl.program_id(2)
    rows = (tl.program_id(1) % num_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + rows
    live = rows < GROUP
    dims = tl.arange(0, BLOCK_D)
    length = tl.load(lengths_ptr + request)
    pages_ptr += request * pages_row
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    q_mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + request * q_token + head[:, None] * q_head + dims[None, :], mask=q_mask, other=0.0)
    first_key, last_key = 0, tl.minimum(length, max_pages * PAGE_SIZE)
    if WINDOW:
        first_key = tl.maximum(0, length - window)
    first_block = first_key // BLOCK_N
    num_tiles = tl.cdiv(last_key, BLOCK_N) - first_block
    tiles_per_split = tl.cdiv(num_tiles, splits)
    begin = (first_block + split * tiles_per_split) * BLOCK_N
    end = tl.minimum(last_key, begin + tiles_per_split * BLOCK_N)
    rows_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    rows_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    for start in range(begin, end, BLOCK_N):
        rows_max, rows_sum, acc = attend_keys(
            q, rows_max, rows_sum, acc, rows,
            k_ptr, v_ptr, pages_ptr, start, first_key, last_key, num_pages,
            k_page, k_token, v_page, v_token, dims, scale, cap, window,
            True, PAGE_SIZE, ONE_PAGE, False, False, CAP, False, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    sinks = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:
        sinks = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
    out, lse = finish_rows(rows_max, rows_sum, acc, sinks, SINKS)
    target = out_ptr + request * out_token + split * out_split + head[:, None] * out_head + dims[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    if LSE:
        tl.store(lse_ptr + request * lse_token + head * lse_head + split, lse, mask=live)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, splits,
    parts_token, parts_head, parts_split, part_lse_token, part_lse_head, out_token, out_head, lse_token,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_S)
    lse = tl.load(part_lse_ptr + request * part_lse_token + head * part_lse_head + part, mask=part < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(lse - base)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - base)
    rows = parts_ptr + request * parts_token + head * parts_head + part[:, None] * parts_split + dims[None, :]
    # A part without keys has weight 0; it is not read, because what lies there is of no step.
    parts = tl.load(rows, mask=(weights > 0.0)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = out_ptr + request * out_token + head * out_head + dims
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if LSE:
        tl.store(lse_ptr + request * lse_token + head, tl.where(total == 0.0, float("-inf"), base + tl.log(total)))


def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.mha_decode`."""
    num_reqs, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A tensor that is not used still needs an address.
    lse = torch.empty((num_reqs, num_heads), dtype=torch.float32, device=q.device) if return_lse else q
    if num_reqs == 0:
        return (out, lse) if return_lse else out
    page_table, seq_lens = unit_columns(page_table), seq_lens.contiguous()
    config = decode_config(q.dtype, head_dim, group, max_seqlen_k, page_size, amd=torch.version.hip is not None)
    blocks = num_kv_heads * triton.cdiv(group, config.block_m)
    longest = max_seqlen_k if sliding_window is None else min(max_seqlen_k, sliding_window)
    splits = num_splits(num_reqs * blocks, longest, config, num_processors(q.device))
    unused = q if sinks is None else sinks
    if splits == 1:
        first_out, first_lse, out_split, lse_strides = out, lse, 0, (num_heads, 1)
    else:
        shape = (num_reqs, num_heads, splits, head_dim)

        def build() -> tuple[torch.Tensor, torch.Tensor]:
            parts = torch.empty(shape, dtype=torch.float32, device=q.device)
            return parts, torch.empty(shape[:3], dtype=torch.float32, device=q.device)

        # All layers of a step may write their partial results to one place: each is merged before the next begins.
        first_out, first_lse = build() if plan is None else plan.prepared(("triton_mha_decode", shape), build)
        out_split, lse_strides = head_dim, (num_heads * splits, splits)
    k_cache, v_cache = fp8_as_bytes(k_cache), fp8_as_bytes(v_cache)
    _decode_kernel[(num_reqs, blocks, splits)](
        q, k_cache, v_cache, first_out, first_lse, unused, page_table, seq_lens,
        num_pages, page_table.shape[1], float(head_dim**-0.5 if softmax_scale is None else softmax_scale),
        float(logit_cap or 0), sliding_window or 0, splits, q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        first_out.stride(0), first_out.stride(1), out_split, *lse_strides, page_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=config.block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        PAGE_SIZE=page_size, WINDOW=sliding_window is not None, CAP=logit_cap is not None,
        SINKS=sinks is not None and splits == 1, LSE=return_lse or splits > 1,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_reqs, num_heads)](
            first_out, first_lse, out, lse, unused, splits,
            first_out.stride(0), first_out.stride(1), out_split, *lse_strides, out.stride(0), out.stride(1), num_heads,
            HEAD_DIM=head_dim, BLOCK_D=config.block_d, BLOCK_S=triton.next_power_of_2(splits),
            SINKS=sinks is not None, LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return (out, lse) if return_lse else out

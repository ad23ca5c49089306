"""Attention to given slots of the latent cache, in Triton: a token's heads are rows of a tile, and its slots the keys.

As in the paged kernels, the slots of a token may be split over programs, whose parts are merged afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.mla.triton.merge import merge_parts
from tokenspeed_kernel.ops.mla.triton.tile import add_keys, add_keys_by_slices, finish_rows
from tokenspeed_kernel.ops.mla.triton.tuning import device_facts, latent_config, num_splits

__all__ = ["sparse_decode", "sparse_prefill"]


@triton.jit(do_not_specialize=["num_slots", "cache_slots", "splits", "q_len", "lse_row"])
def _sparse_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, slots_ptr, num_slots, cache_slots, page_size, scale, splits, q_len,
    q_req, q_token, q_head, kv_page, kv_token, slots_req, slots_token, out_req, out_token, out_head, out_split, lse_row,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    num_blocks: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    heads = tl.program_id(0) % num_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    live = heads < HEADS
    request, query = token // q_len, token % q_len
    q_rows = q_ptr + request * q_req + query * q_token + heads * q_head
    slots_ptr += request * slots_req + query * slots_token
    tiles_per_split = tl.cdiv(tl.cdiv(num_slots, BLOCK_N), splits)
    begin = split * tiles_per_split * BLOCK_N
    end = tl.minimum(num_slots, begin + tiles_per_split * BLOCK_N)
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
        entries = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + entries, mask=entries < end, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < cache_slots)
        page = slot // page_size
        kv_rows = page * kv_page + (slot - page * page_size) * kv_token
        if CHUNK == 0:
            rows_max, rows_sum, acc = add_keys(
                q_latent, q_rope, rows_max, rows_sum, acc, kv_ptr, kv_rows, valid, valid[None, :], scale,
                LATENT, ROPE, BLOCK_L, BLOCK_R,
            )  # fmt: skip
        else:
            rows_max, rows_sum, acc = add_keys_by_slices(
                q_rows, live, rows_max, rows_sum, acc, kv_ptr, kv_rows, valid, valid[None, :], scale, value_dims,
                LATENT, ROPE, CHUNK, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    out, lse = finish_rows(rows_max, rows_sum, acc)
    target = out_ptr + request * out_req + query * out_token + heads * out_head + split * out_split
    mask = live[:, None] & (value_dims < LATENT)[None, :]
    tl.store(target[:, None] + value_dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        # Every slice of values has the same.
        tl.store(lse_ptr + (token * HEADS + heads) * lse_row + split, lse, mask=live)


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
    """See `tokenspeed_kernel.ops.dsa.sparse_decode`."""
    if out is None:
        out = torch.empty((*q.shape[:3], latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    strides = (q.stride()[:3], slots.stride()[:2], out.stride()[:3])
    _launch(q, kv_cache, slots, strides, q.shape[0] * q.shape[1], q.shape[1], softmax_scale, out, lse)
    return out if lse is None else (out, lse)


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
    """See `tokenspeed_kernel.ops.dsa.sparse_prefill`."""
    if out is None:
        out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    strides = ((q.stride(0), 0, q.stride(1)), (slots.stride(0), 0), (out.stride(0), 0, out.stride(1)))
    _launch(q, kv_cache, slots, strides, q.shape[0], 1, softmax_scale, out, lse)
    return out if lse is None else (out, lse)


def _launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    strides: tuple[tuple[int, ...], ...],
    num_tokens: int,
    q_len: int,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    num_heads, width = q.shape[-2:]
    latent_dim, num_slots = out.shape[-1], slots.shape[-1]
    if num_tokens == 0:
        return
    num_pages, page_size, _ = kv_cache.shape
    facts = device_facts(q.device)
    config = latent_config(q.dtype, latent_dim, width - latent_dim, num_heads, num_slots, 1, facts)
    programs = num_tokens * triton.cdiv(num_heads, config.block_m)
    slices = triton.cdiv(latent_dim, config.block_v)
    splits = num_splits(programs * slices, num_slots, config, facts)
    q_strides, slots_strides, out_strides = strides
    first_out, first_lse, first_strides, out_split = out, lse, out_strides, 0
    if splits > 1:
        first_out = torch.empty((num_tokens * num_heads, splits, latent_dim), dtype=torch.float32, device=q.device)
        first_lse = torch.empty((num_tokens * num_heads, splits), dtype=torch.float32, device=q.device)
        head = splits * latent_dim
        first_strides, out_split = (q_len * num_heads * head, num_heads * head, head), latent_dim
    _sparse_kernel[(programs, splits, slices)](
        q, kv_cache, first_out, first_out if first_lse is None else first_lse, slots,
        num_slots, num_pages * page_size, page_size, float(softmax_scale), splits, q_len,
        *q_strides, *kv_cache.stride()[:2], *slots_strides, *first_strides, out_split, splits,
        HEADS=num_heads, LATENT=latent_dim, ROPE=width - latent_dim, BLOCK_L=config.block_l, BLOCK_R=config.block_r,
        BLOCK_V=config.block_v, CHUNK=config.chunk, BLOCK_M=config.block_m, BLOCK_N=config.block_n, LSE=first_lse is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        assert first_lse is not None
        merge_parts(first_out, first_lse, out, lse, q_len, out_strides)

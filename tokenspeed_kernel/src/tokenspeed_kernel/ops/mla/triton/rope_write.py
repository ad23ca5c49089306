"""Rotation of rope parts and write of latent rows in one launch: programs of query heads, and one for the token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernel.ops.kvcache.triton.rope_write import load_angles, load_pairs, rotate, store_pairs

__all__ = ["launch", "rope_write_mla"]

# Pairs of elements that a program rotates at most.
_MAX_PAIRS = 512


@triton.jit(do_not_specialize=["max_position", "num_slots"])
def _rope_write_mla_kernel(
    q_ptr, k_ptr, latent_ptr, positions_ptr, table_ptr, kv_ptr, slots_ptr, q_out_ptr,
    max_position, num_slots, page_size, num_heads, q_token, q_head, k_token, latent_token, q_out_token, q_out_head,
    kv_page, kv_token, position_step, slot_step,
    LATENT: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        # The programs of a launch start while the last of the one before it end, and wait here until its results are in memory.
        gdc_wait()
        gdc_launch_dependents()
    # Programs of one token follow each other, as its heads do in memory.
    num_groups = tl.cdiv(num_heads, HEADS) + 1
    group = tl.program_id(0) % num_groups
    token = (tl.program_id(0) // num_groups).to(tl.int64)
    position = tl.load(positions_ptr + token * position_step).to(tl.int64)
    if group < tl.cdiv(num_heads, HEADS):
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        live = head < num_heads
        a, b = load_pairs(q_ptr + token * q_token + head * q_head, live, HALF, BLOCK, INTERLEAVED)
        cos, sin = load_angles(table_ptr, position, max_position, HALF, BLOCK)
        a, b = rotate(a, b, cos, sin, q_out_ptr.dtype.element_ty)
        store_pairs(q_out_ptr + token * q_out_token + head * q_out_head, a, b, live, HALF, BLOCK, INTERLEAVED)
    else:
        slot = tl.load(slots_ptr + token * slot_step)
        page = slot // page_size
        row = kv_ptr + page * kv_page + (slot - page * page_size) * kv_token  # 64 bits: a pool can pass 2**31 elements
        rows_here = tl.where((slot >= 0) & (slot < num_slots), 1, 0)
        one = tl.arange(0, 1)[:, None]  # a tile of one row
        here = one < rows_here
        first, second = load_pairs(k_ptr + token * k_token + one, here, HALF, BLOCK, INTERLEAVED)
        dims = tl.arange(0, BLOCK_L)
        seen = dims < LATENT * rows_here
        latent = tl.load(latent_ptr + token * latent_token + dims, mask=seen)
        cos, sin = load_angles(table_ptr, position, max_position, HALF, BLOCK)
        first, second = rotate(first, second, cos, sin, kv_ptr.dtype.element_ty)
        tl.store(row + dims, latent, mask=seen)
        store_pairs(row + LATENT + one, first, second, here, HALF, BLOCK, INTERLEAVED)


def rope_write_mla(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.mla.rope_write_mla`."""
    return launch(q_rope, k_rope, latent, positions, cos_sin_cache, kv_cache, slot_mapping, interleaved, q_out, chained=False)


def launch(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    q_out: torch.Tensor | None,
    *,
    chained: bool,
    max_pairs: int = _MAX_PAIRS,
    num_warps: int = 2,
) -> torch.Tensor:
    """Launch the kernel; chained, it overlaps the end of the launch before it (sm_90 and later)."""
    num_tokens, num_heads, rope_dim = q_rope.shape
    num_pages, page_size, _ = kv_cache.shape
    latent_dim = latent.shape[1]
    if q_out is None:
        q_out = torch.empty(q_rope.shape, dtype=q_rope.dtype, device=q_rope.device)
    if num_tokens == 0:
        return q_out
    block = triton.next_power_of_2(rope_dim // 2)
    heads = max(1, min(max_pairs // block, triton.next_power_of_2(num_heads)))
    options = {"launch_pdl": True} if chained else {}
    _rope_write_mla_kernel[(num_tokens * (triton.cdiv(num_heads, heads) + 1),)](
        q_rope, k_rope, latent, positions, cos_sin_cache, kv_cache, slot_mapping, q_out,
        cos_sin_cache.shape[0], num_pages * page_size, page_size, num_heads,
        q_rope.stride(0), q_rope.stride(1), k_rope.stride(0), latent.stride(0), q_out.stride(0), q_out.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), positions.stride(0), slot_mapping.stride(0),
        LATENT=latent_dim, HALF=rope_dim // 2, BLOCK=block, BLOCK_L=triton.next_power_of_2(latent_dim), HEADS=heads,
        INTERLEAVED=interleaved, CHAINED=chained, num_warps=num_warps, **options,
    )  # fmt: skip
    return q_out

"""Write of latent rows in Triton: one program copies one token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["write_mla_cache"]


@triton.jit
def _write_kernel(
    latent_ptr, rope_ptr, kv_ptr, slots_ptr, num_slots, page_size,
    latent_token, rope_token, kv_page, kv_token, slot_step,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slot_step)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        row = kv_ptr + page * kv_page + (slot - page * page_size) * kv_token  # 64 bits: a pool can pass 2**31 elements
        dims, rope_dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
        latent = tl.load(latent_ptr + token * latent_token + dims, mask=dims < LATENT)
        rope = tl.load(rope_ptr + token * rope_token + rope_dims, mask=rope_dims < ROPE)
        tl.store(row + dims, latent.to(kv_ptr.dtype.element_ty), mask=dims < LATENT)
        tl.store(row + LATENT + rope_dims, rope.to(kv_ptr.dtype.element_ty), mask=rope_dims < ROPE)


def write_mla_cache(latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `tokenspeed_kernel.ops.mla.write_mla_cache`."""
    num_pages, page_size, _ = kv_cache.shape
    num_tokens, latent_dim = latent.shape
    if num_tokens == 0 or num_pages * page_size == 0:
        return
    rope_dim = rope.shape[1]
    _write_kernel[(num_tokens,)](
        latent, rope, kv_cache, slot_mapping, num_pages * page_size, page_size,
        latent.stride(0), rope.stride(0), kv_cache.stride(0), kv_cache.stride(1), slot_mapping.stride(0),
        LATENT=latent_dim, ROPE=rope_dim, BLOCK_L=triton.next_power_of_2(latent_dim),
        BLOCK_R=triton.next_power_of_2(max(rope_dim, 1)), num_warps=2,
    )  # fmt: skip

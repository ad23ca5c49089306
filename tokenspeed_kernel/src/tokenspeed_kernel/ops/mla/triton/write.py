"""Write of latent rows in Triton: one program copies one token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.kvcache.triton.fp8 import encode_e4m3
from tokenspeed_kernel.ops.mla.packed import SCALE_BLOCK

__all__ = ["write_mla_cache"]


_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _bf16_bits(x):
    """float32 to the bits of bf16, to nearest even; in integer arithmetic, because the interpreter's conversion cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _write_packed(row, latent, latent_mask, rope, rope_mask, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr):
    """Codes, their scales, and the rope in bf16, as `packed` lays them out; latent is whole blocks of one scale."""
    BLOCKS: tl.constexpr = BLOCK_L // _SCALE_BLOCK
    x = tl.where(latent_mask, latent.to(tl.float32), 0.0)
    x = tl.reshape(x, [BLOCKS, _SCALE_BLOCK])
    # Infinity and NaN have no part in the scale: the comparison is false for NaN.
    largest = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 1)
    scale = tl.div_rn(largest, tl.full([BLOCKS], 448.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    codes = encode_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCKS, _SCALE_BLOCK])))
    tl.store(row + tl.arange(0, BLOCK_L), tl.reshape(codes, [BLOCK_L]).to(tl.uint8), mask=latent_mask)
    block = tl.arange(0, BLOCKS)
    tl.store((row + LATENT).to(tl.pointer_type(tl.float32)) + block, scale, mask=block < LATENT // _SCALE_BLOCK)
    first = (row + LATENT + LATENT // _SCALE_BLOCK * 4).to(tl.pointer_type(tl.int16))
    tl.store(first + tl.arange(0, BLOCK_R), _bf16_bits(rope.to(tl.float32)), mask=rope_mask)


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
        if kv_ptr.dtype.element_ty == tl.uint8:
            _write_packed(row, latent, dims < LATENT, rope, rope_dims < ROPE, LATENT, BLOCK_L, BLOCK_R)
        else:
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

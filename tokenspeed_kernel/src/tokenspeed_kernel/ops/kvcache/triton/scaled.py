"""Scaling to fp8 in Triton: one program a token's keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.kvcache.triton.fp8 import encode_e4m3

__all__ = ["quantize_kv", "write_scaled_kv"]


@triton.jit
def _write_scaled_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, num_slots, page_size,
    k_token, k_head, v_token, v_head, k_page, k_offset, k_cache_head, v_page, v_offset, v_cache_head,
    slot_step, k_scale_step, v_scale_step,
    ELEMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = token
    if PAGED:
        slot = tl.load(slots_ptr + token * slot_step)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        offset = slot - page * page_size  # 64 bits: a pool can pass 2**31 elements
        element = tl.arange(0, BLOCK)
        mask = element < ELEMENTS
        head, dim = element // HEAD_DIM, element % HEAD_DIM
        k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=mask, other=0.0).to(tl.float32)
        k_scale = tl.load(k_scale_ptr + head * k_scale_step, mask=mask, other=1.0)
        v_scale = tl.load(v_scale_ptr + head * v_scale_step, mask=mask, other=1.0)
        k_code = encode_e4m3(tl.div_rn(k, k_scale)).to(tl.uint8)
        v_code = encode_e4m3(tl.div_rn(v, v_scale)).to(tl.uint8)
        tl.store(k_cache_ptr + page * k_page + offset * k_offset + head * k_cache_head + dim, k_code, mask=mask)
        tl.store(v_cache_ptr + page * v_page + offset * v_offset + head * v_cache_head + dim, v_code, mask=mask)


def write_scaled_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """See `tokenspeed_kernel.ops.kvcache.write_scaled_kv`."""
    num_pages, page_size = k_cache.shape[:2]
    if num_pages * page_size:
        _launch(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, num_pages * page_size, page_size)


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.kvcache.quantize_kv`."""
    if k_out is None:
        k_out = torch.empty(k.shape, dtype=torch.float8_e4m3fn, device=k.device)
    if v_out is None:
        v_out = torch.empty(v.shape, dtype=torch.float8_e4m3fn, device=v.device)
    # Tokens in the place of slots, in pages of one.
    _launch(k, v, k_out[:, None], v_out[:, None], None, k_scale, v_scale, k.shape[0], 1)
    return k_out, v_out


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    num_slots: int,
    page_size: int,
) -> None:
    num_tokens, num_heads, head_dim = k.shape
    elements = num_heads * head_dim
    if num_tokens == 0 or elements == 0:
        return
    block = triton.next_power_of_2(elements)
    _write_scaled_kv_kernel[(num_tokens,)](
        k, v, k_cache.view(torch.uint8), v_cache.view(torch.uint8), k_scale if slot_mapping is None else slot_mapping,
        k_scale, v_scale, num_slots, page_size, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], 0 if slot_mapping is None else slot_mapping.stride(0),
        k_scale.stride(0) if k_scale.dim() else 0, v_scale.stride(0) if v_scale.dim() else 0,
        ELEMENTS=elements, HEAD_DIM=head_dim, BLOCK=block, PAGED=slot_mapping is not None, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip

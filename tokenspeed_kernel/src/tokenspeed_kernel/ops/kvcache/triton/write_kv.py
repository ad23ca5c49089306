"""Cache write in Triton: one program copies one token's keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["write_kv"]


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, num_slots, page_size,
    k_token, k_head, v_token, v_head, k_page, k_offset, k_cache_head, v_page, v_offset, v_cache_head, slot_step,
    ELEMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slot_step)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        offset = slot - page * page_size  # 64 bits: a pool can pass 2**31 elements
        element = tl.arange(0, BLOCK)
        mask = element < ELEMENTS
        head, dim = element // HEAD_DIM, element % HEAD_DIM
        k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=mask)
        v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=mask)
        k_slot = k_cache_ptr + page * k_page + offset * k_offset
        v_slot = v_cache_ptr + page * v_page + offset * v_offset
        tl.store(k_slot + head * k_cache_head + dim, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_slot + head * v_cache_head + dim, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `tokenspeed_kernel.ops.kvcache.write_kv`."""
    num_pages, page_size, num_heads, head_dim = k_cache.shape
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or num_pages * page_size == 0:
        return
    elements = num_heads * head_dim
    block = triton.next_power_of_2(elements)
    _write_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, num_pages * page_size, page_size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], slot_mapping.stride(0),
        ELEMENTS=elements, HEAD_DIM=head_dim, BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip

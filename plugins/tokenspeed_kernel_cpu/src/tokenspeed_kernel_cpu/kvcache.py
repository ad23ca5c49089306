"""Cache write, to numbers of the cache's dtype; see `tokenspeed_kernel.ops.kvcache` for the contract."""

from __future__ import annotations

import torch

from tokenspeed_kernel_cpu import _kernels
from tokenspeed_kernel_cpu.formats import NUMBERS


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write new tokens' keys and values into their slots of a paged cache, in place."""
    num_pages, page_size, heads, head_dim = k_cache.shape
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    k_page, k_slot, k_cache_head, _ = k_cache.stride()
    v_page, v_slot, v_cache_head, _ = v_cache.stride()
    _kernels.write_kv(
        k.data_ptr(), NUMBERS[k.dtype], k_token, k_head, v.data_ptr(), v_token, v_head,
        k_cache.data_ptr(), NUMBERS[k_cache.dtype], k_page, k_slot, k_cache_head,
        v_cache.data_ptr(), v_page, v_slot, v_cache_head,
        slot_mapping.data_ptr(), slot_mapping.stride(0), slot_mapping.shape[0], num_pages, page_size, heads, head_dim,
    )  # fmt: skip

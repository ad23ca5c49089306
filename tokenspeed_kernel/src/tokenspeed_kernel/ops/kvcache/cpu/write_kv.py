"""Cache write on the CPU with PyTorch's indexed copy."""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store each token's key and value in its slot; see the public op for the contract."""
    num_pages, page_size, num_heads, head_dim = k_cache.shape
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or num_pages * page_size == 0:
        return
    lowest, highest = slot_mapping.aminmax()
    if int(lowest) < 0 or int(highest) >= num_pages * page_size:
        kept = ((slot_mapping >= 0) & (slot_mapping < num_pages * page_size)).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    for values, cache in ((k, k_cache), (v, v_cache)):
        values = values.to(cache.dtype)
        if cache.stride(0) == page_size * cache.stride(1):
            cache.view(num_pages * page_size, num_heads, head_dim).index_put_((slot_mapping,), values)
        else:
            # The pages are not evenly spaced in memory (a slice of a larger pool): index page and offset apart.
            pages = torch.div(slot_mapping, page_size, rounding_mode="floor")
            cache.index_put_((pages, slot_mapping - pages * page_size), values)

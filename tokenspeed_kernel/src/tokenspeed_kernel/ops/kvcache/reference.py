"""The truth of the kvcache family: one token at a time."""

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
    num_pages, page_size = k_cache.shape[:2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_pages * page_size:
            page, offset = divmod(slot, page_size)
            k_cache[page, offset] = k[token].to(k_cache.dtype)
            v_cache[page, offset] = v[token].to(v_cache.dtype)

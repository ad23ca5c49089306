"""Write of latent rows on the CPU, with PyTorch's indexed copy."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.mla.packed import pack_rows

__all__ = ["write_mla_cache"]


def write_mla_cache(latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store each token's latent row in its slot; see the public op for the contract."""
    num_pages, page_size, _ = kv_cache.shape
    kept = ((slot_mapping >= 0) & (slot_mapping < num_pages * page_size)).nonzero().squeeze(1)
    if len(kept) < len(slot_mapping):
        latent, rope, slot_mapping = latent[kept], rope[kept], slot_mapping[kept]
    if len(slot_mapping) == 0:
        return
    pages = torch.div(slot_mapping, page_size, rounding_mode="floor")
    packed = kv_cache.dtype is torch.uint8
    rows = pack_rows(latent, rope) if packed else torch.cat((latent, rope), dim=1).to(kv_cache.dtype)
    kv_cache.index_put_((pages, slot_mapping - pages * page_size), rows)

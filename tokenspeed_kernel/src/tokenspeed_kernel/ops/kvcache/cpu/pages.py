"""Copies of pages on the CPU with PyTorch's indexed copies."""

from __future__ import annotations

import torch

__all__ = ["copy_pages", "transfer_pages"]


def copy_pages(
    pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor, *, scratch: torch.Tensor | None = None
) -> None:
    """See `tokenspeed_kernel.ops.kvcache.copy_pages`. The pages on their way are PyTorch's: `scratch` is not needed."""
    transfer_pages(pool, pool, src_pages, dst_pages)


def transfer_pages(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
) -> None:
    """See `tokenspeed_kernel.ops.kvcache.transfer_pages`."""
    inside = (src_pages >= 0) & (src_pages < src_pool.shape[0]) & (dst_pages >= 0) & (dst_pages < dst_pool.shape[0])
    if not bool(inside.all()):
        src_pages, dst_pages = src_pages[inside], dst_pages[inside]
    if src_pages.numel():
        source, target = _bytes(src_pool), _bytes(dst_pool)
        target[dst_pages.long()] = source[src_pages.long()]


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    """[num_pages, bytes of a page] uint8; a page is contiguous, the pages may lie apart."""
    num_pages, size = pool.shape[0], pool.element_size()
    page_bytes = pool[0].numel() * size if num_pages else 0
    flat = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())
    return flat.as_strided((num_pages, page_bytes), (pool.stride(0) * size, 1), pool.storage_offset() * size)

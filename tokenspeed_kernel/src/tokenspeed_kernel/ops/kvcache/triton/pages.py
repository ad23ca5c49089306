"""Copies of pages in Triton; a pool of the host is read and written in place, over the bus, if its memory is pinned."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["copy_pages", "transfer_pages"]

_BLOCK_BYTES = 16384
# A copy over the bus is as fast with few programs as with many, which would sit on the whole GPU and wait: matrix products beside
# it had to wait for its end (H200: 87 ms of products and 56 ms of copies took 131 ms together).
_BUS_PROGRAMS = 32
_BUS_WORDS = 1024  # at a time by each of them
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def _transfer_pages_kernel(
    src_ptr, dst_ptr, src_pages_ptr, dst_pages_ptr, num_src, num_dst, page_words, src_page, dst_page, src_step, dst_step,
    SRC_BY_PAIR: tl.constexpr, DST_BY_PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    # Both pages count even where one of them is on its way through the scratch memory, which is in the order of the pairs.
    src = tl.load(src_pages_ptr + pair * src_step).to(tl.int64)
    dst = tl.load(dst_pages_ptr + pair * dst_step).to(tl.int64)
    if (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst):
        if SRC_BY_PAIR:
            src = pair
        if DST_BY_PAIR:
            dst = pair
        words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = words < page_words
        value = tl.load(src_ptr + src * src_page + words, mask=mask)
        tl.store(dst_ptr + dst * dst_page + words, value, mask=mask)


@triton.jit
def _stream_pages_kernel(
    src_ptr, dst_ptr, src_pages_ptr, dst_pages_ptr, num_src, num_dst, page_words, src_page, dst_page, src_step, dst_step,
    num_pairs, BLOCK: tl.constexpr,
):  # fmt: skip
    # A fixed number of programs share the blocks of all pages, neighbours at the same time.
    blocks = tl.cdiv(page_words, BLOCK)
    for item in range(tl.program_id(0), num_pairs * blocks, tl.num_programs(0)):
        pair = (item // blocks).to(tl.int64)
        src = tl.load(src_pages_ptr + pair * src_step).to(tl.int64)
        dst = tl.load(dst_pages_ptr + pair * dst_step).to(tl.int64)
        if (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst):
            words = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
            mask = words < page_words
            value = tl.load(src_ptr + src * src_page + words, mask=mask)
            tl.store(dst_ptr + dst * dst_page + words, value, mask=mask)


def copy_pages(
    pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor, *, scratch: torch.Tensor | None = None
) -> None:
    """See `tokenspeed_kernel.ops.kvcache.copy_pages`."""
    pairs = src_pages.shape[0]
    if pairs == 0 or pool.numel() == 0:
        return
    if scratch is None:
        scratch = torch.empty((pairs, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    _launch(pool, scratch, src_pages, dst_pages, pool.shape[0], pool.shape[0], dst_by_pair=True)
    _launch(scratch, pool, src_pages, dst_pages, pool.shape[0], pool.shape[0], src_by_pair=True)


def transfer_pages(src_pool: torch.Tensor, dst_pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """See `tokenspeed_kernel.ops.kvcache.transfer_pages`."""
    if src_pages.shape[0] and src_pool.numel() and dst_pool.numel():
        programs = _BUS_PROGRAMS if src_pool.is_cpu is not dst_pool.is_cpu else 0
        _launch(src_pool, dst_pool, src_pages, dst_pages, src_pool.shape[0], dst_pool.shape[0], programs=programs)


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    num_src: int,
    num_dst: int,
    *,
    src_by_pair: bool = False,
    dst_by_pair: bool = False,
    programs: int = 0,
) -> None:
    """Copy pair by pair; by `programs` programs where that is not 0."""
    size = source.element_size()
    page_bytes = source[0].numel() * size
    places = (page_bytes, *(one.stride(0) * size for one in (source, target)), source.data_ptr(), target.data_ptr())
    word, dtype = next((word, dtype) for word, dtype in _WORDS if all(place % word == 0 for place in places))
    page_words = page_bytes // word
    block = min(triton.next_power_of_2(page_words), _BLOCK_BYTES // word)
    pairs = src_pages.shape[0]
    operands = (
        *(_words(one, dtype) for one in (source, target)), src_pages, dst_pages, num_src, num_dst, page_words,
        source.stride(0) * size // word, target.stride(0) * size // word, src_pages.stride(0), dst_pages.stride(0),
    )  # fmt: skip
    bus_block = min(block, _BUS_WORDS)
    blocks = pairs * triton.cdiv(page_words, bus_block)
    if programs and blocks < 2**31:
        _stream_pages_kernel[(min(programs, blocks),)](*operands, pairs, BLOCK=bus_block, num_warps=4)
        return
    _transfer_pages_kernel[(pairs, triton.cdiv(page_words, block))](
        *operands, SRC_BY_PAIR=src_by_pair, DST_BY_PAIR=dst_by_pair, BLOCK=block, num_warps=4
    )


def _words(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One page as words; the kernel finds the others by their distance. An empty view of the same address will do."""
    return pool.as_strided((pool[0].numel(),), (1,), pool.storage_offset()).view(dtype)

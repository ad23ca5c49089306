"""Page tables as vendor libraries want them: only pages that exist, one behind the other.

The ops here ignore page ids outside of the cache; the libraries would read there. A row that attends to all its keys does not care
where they stand, so the missing pages are left out and the rest moves up. With several queries a row and a causal mask that holds
only while the pages of the new tokens are there; `regular` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CompactPages", "HostPages", "compact", "host_pages", "is_regular", "one_query_rows"]


@dataclass(frozen=True, slots=True)
class CompactPages:
    """Pages that exist, in their order.

    Attributes:
        page_table: [num_reqs, max_pages] int32; entries behind the last page are 0.
        seq_lens: [num_reqs] int32, keys on those pages.
        counts: [num_reqs] int64, how many pages they are.
        missing: [num_reqs, max_pages] bool, pages of the given table that hold keys and do not exist.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    counts: torch.Tensor
    missing: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostPages:
    """The pages of a batch as compressed rows, with what the host knows of them.

    Attributes:
        indptr: [num_reqs + 1] int32 on the CPU, where each request's pages start in `indices`.
        indices: [number of pages] int32 on the device.
        last_page_len: [num_reqs] int32 on the CPU, keys on a request's last page; 0 without any.
        seq_lens: [num_reqs] int32 on the CPU.
        has_empty: some request has no key.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    has_empty: bool


def compact(page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_pages: int) -> CompactPages:
    """Leave out the pages that are not in the cache. Nothing waits for the device.

    Args:
        page_table: [num_reqs, max_pages] int32.
        seq_lens: [num_reqs] int32.
        page_size: tokens in a page.
        num_pages: pages of the cache.
    """
    starts = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    tokens = (seq_lens.unsqueeze(1) - starts).clamp_(0, page_size)
    exists = (page_table >= 0) & (page_table < num_pages)
    present = exists & (tokens > 0)
    order = torch.argsort(~present, dim=1, stable=True)
    counts = present.sum(1)
    behind = torch.arange(page_table.shape[1], device=page_table.device) >= counts.unsqueeze(1)
    table = page_table.gather(1, order).masked_fill_(behind, 0)
    return CompactPages(table, (tokens * present).sum(1).to(torch.int32), counts, (tokens > 0) & ~exists)


def host_pages(pages: CompactPages, page_size: int) -> HostPages:
    """Bring to the host what the libraries plan with. Waits for the device."""
    counts = pages.counts.cpu()
    lens = pages.seq_lens.cpu()
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, out=indptr[1:])
    columns = torch.arange(pages.page_table.shape[1], device=pages.page_table.device)
    indices = pages.page_table[columns < pages.counts.unsqueeze(1)]
    last = torch.where(lens > 0, (lens - 1) % page_size + 1, 0).to(torch.int32)
    return HostPages(indptr, indices, last, lens, bool((lens == 0).any()))


def is_regular(pages: CompactPages, seq_lens: torch.Tensor, num_queries: torch.Tensor, page_size: int) -> bool:
    """Whether a causal mask aligned with the tail of the compacted keys is the right one. Waits for the device.

    Args:
        pages: of the batch.
        seq_lens: [num_reqs] int32, as given.
        num_queries: [num_reqs], new tokens of each request.
        page_size: tokens in a page.
    """
    ends = torch.arange(1, pages.missing.shape[1] + 1, device=pages.missing.device) * page_size
    new = ends > (seq_lens - num_queries).unsqueeze(1)
    wrong = (pages.missing & new).any() | (num_queries > seq_lens).any()
    return not bool(wrong)


def one_query_rows(
    page_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, num_tokens: int, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page table and lengths with a row for each query: right whatever page is missing, at the price of reading keys again.

    Returns:
        [num_tokens, max_pages] and [num_tokens] int32.
    """
    counts = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    owner = torch.repeat_interleave(counts, output_size=num_tokens)
    if not causal:
        return page_table[owner], seq_lens[owner]
    token = torch.arange(num_tokens, device=page_table.device) - cu_seqlens_q[:-1].long()[owner]
    position = seq_lens[owner] - counts[owner] + token
    return page_table[owner], (position + 1).clamp_(min=0).to(torch.int32)

"""Sorting (token, expert) pairs by expert: one launch, no atomics, nothing read back, the same order each time.

One program an expert. In a first pass over all ids it counts the pairs of its own expert and of those before it, which gives its
first row; in a second pass it numbers its pairs in the order in which they come. The ids are few and stay in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["SortedPairs", "sort_pairs"]

_MAX_BLOCK = 1024


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts.

    Attributes:
        pair_of_row: [num_pairs] int32; -1 for rows that no pair fills.
        row_of_pair: [num_tokens, top_k] int32; -1 for pairs that are dropped.
        offsets: [num_experts + 1] int32, first row of each expert.
    """

    pair_of_row: torch.Tensor
    row_of_pair: torch.Tensor
    offsets: torch.Tensor


@triton.jit
def _local_ids(ids_ptr, pairs, num_pairs, top_k, num_experts, first_expert, ids_row, ids_col):
    token = (pairs // top_k).to(tl.int64)
    ids = tl.load(ids_ptr + token * ids_row + (pairs % top_k) * ids_col, mask=pairs < num_pairs, other=-1) - first_expert
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)


@triton.jit
def _sort_kernel(
    ids_ptr, pair_of_row_ptr, row_of_pair_ptr, offsets_ptr,
    num_pairs, top_k, num_experts, first_expert, ids_row, ids_col, BLOCK: tl.constexpr,
):  # fmt: skip
    # Dropped pairs belong to one more expert, num_experts: their rows come last.
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        ids = _local_ids(ids_ptr, pairs, num_pairs, top_k, num_experts, first_expert, ids_row, ids_col)
        before += ((pairs < num_pairs) & (ids < expert)).to(tl.int32)
    row = tl.sum(before, 0)
    tl.store(offsets_ptr + expert, row)
    dropped = expert == num_experts
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        ids = _local_ids(ids_ptr, pairs, num_pairs, top_k, num_experts, first_expert, ids_row, ids_col)
        mine = (pairs < num_pairs) & (ids == expert)
        count = mine.to(tl.int32)
        rows = row + tl.cumsum(count, 0) - 1
        tl.store(row_of_pair_ptr + pairs, tl.where(dropped, -1, rows), mask=mine)
        tl.store(pair_of_row_ptr + rows, tl.where(dropped, -1, pairs), mask=mine)
        row += tl.sum(count, 0)


def sort_pairs(topk_ids: torch.Tensor, num_experts: int, first_expert: int) -> SortedPairs:
    """Sort the pairs of [num_tokens, top_k] ids; see `SortedPairs`."""
    num_pairs, device = topk_ids.numel(), topk_ids.device
    pair_of_row = torch.empty((num_pairs,), dtype=torch.int32, device=device)
    row_of_pair = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
    offsets = torch.empty((num_experts + 1,), dtype=torch.int32, device=device)
    block = min(triton.next_power_of_2(max(num_pairs, 32)), _MAX_BLOCK)
    _sort_kernel[(num_experts + 1,)](
        topk_ids, pair_of_row, row_of_pair, offsets,
        num_pairs, max(topk_ids.shape[1], 1), num_experts, first_expert, *topk_ids.stride(), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return SortedPairs(pair_of_row, row_of_pair, offsets)

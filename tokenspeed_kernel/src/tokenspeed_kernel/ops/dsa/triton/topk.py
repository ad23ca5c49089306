"""Choice of the best scores, in Triton.

A row that fits in the registers of one program is chosen from there. Of a longer one a sample is taken, whose r-th best is, but
for one row in many thousands, below the row's k-th best and not far below it. What reaches it in each part of the row is packed, in
order, and the last launch chooses among these few. Whether they were enough, and not too many, is counted, not assumed: otherwise
that program reads the row itself, digit by digit.

What is chosen follows from the scores alone, whatever the sample, the parts and the timing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.triton.tuning import unit_columns
from tokenspeed_kernel.ops.dsa.triton.threshold import kth_largest, load_ordered, row_threshold
from tokenspeed_kernel.ops.mla.triton.tuning import power_of_two

__all__ = ["NOMINATING_WARPS", "ChoiceConfig", "choice_config", "topk_slots"]

NOMINATING_WARPS = 8
"""Of a program that samples or nominates."""


@triton.jit(do_not_specialize=["num_keys", "rank"])
def _sample_kernel(scores_ptr, least_ptr, num_keys, rank, scores_row, SAMPLE: tl.constexpr):
    """Write the integer that about `rank` of a row's sample reach; 1, which all reach, if there are no more."""
    row = tl.program_id(0).to(tl.int64)
    # Spread over the row, whose neighbours are alike.
    sampled = (tl.arange(0, SAMPLE).to(tl.int64) * num_keys // SAMPLE).to(tl.int32)
    keys = load_ordered(scores_ptr + row * scores_row, sampled, num_keys)
    least = tl.min(tl.where(keys > 0, keys, 0xFFFFFFFF), 0)
    chosen = kth_largest(keys, least, rank, rank // 16)
    everything = tl.sum((keys > 0).to(tl.int32), 0) <= rank + rank // 16
    tl.store(least_ptr + row, tl.where(everything, 1, chosen).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_keys"])
def _nominate_kernel(
    scores_ptr, least_ptr, keys_ptr, positions_ptr, counts_ptr, num_keys, scores_row, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Pack what may be among the best of one part of a row: at the part's place, as much as there is."""
    row = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = load_ordered(scores_ptr + row * scores_row, positions, num_keys)
    taken = keys >= tl.load(least_ptr + row).to(tl.uint32, bitcast=True)
    ranks = tl.cumsum(taken.to(tl.int32), 0)
    part = row * PARTS + tl.program_id(1)
    target = part * BLOCK + ranks - 1
    tl.store(keys_ptr + target, keys.to(tl.int32, bitcast=True), mask=taken)
    tl.store(positions_ptr + target, positions, mask=taken)
    tl.store(counts_ptr + part, tl.max(ranks, 0))


@triton.jit
def _store_slots(out_ptr, pages_ptr, positions, keys, threshold, missing, above, equal, page_size, PAGED: tl.constexpr):
    """Write the slots of those chosen among some entries, behind those of `above` and `equal` earlier ones; returns both after."""
    # One scan of two counts; a block has fewer than 2**15 entries.
    greater, same = keys > threshold, (keys > 0) & (keys == threshold)
    both = tl.cumsum(tl.where(greater, 1 << 16, 0) + same.to(tl.int32), 0)
    above_ranks, equal_ranks = above + (both >> 16), equal + (both & 0xFFFF)
    taken = greater | (same & (equal_ranks <= missing))
    slots = positions
    if PAGED:
        page = tl.load(pages_ptr + positions // page_size, mask=taken, other=-1).to(tl.int64)
        slot = page * page_size + positions % page_size
        slots = tl.where((page >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)
    tl.store(out_ptr + above_ranks + tl.minimum(equal_ranks, missing) - 1, slots, mask=taken)
    return tl.max(above_ranks, 0), tl.max(equal_ranks, 0)


@triton.jit(do_not_specialize=["num_reqs", "num_keys", "k", "page_size", "first_row"])
def _choose_kernel(
    scores_ptr, out_ptr, pages_ptr, cu_q_ptr, least_ptr, keys_ptr, positions_ptr, counts_ptr, num_reqs, num_keys, k, page_size,
    first_row, scores_row, out_row, pages_row,
    PAGED: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the k best of a row: among those nominated in PARTS parts, or with PARTS 0 among all, or block by block."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * scores_row
    out_ptr += row * out_row
    if PAGED:
        low, high = 0, num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_q_ptr + middle) <= row + first_row:
                low = middle
            else:
                high = middle
        pages_ptr += (low + tl.zeros([], tl.int64)) * pages_row
    above = tl.zeros([], dtype=tl.int32)
    equal = tl.zeros([], dtype=tl.int32)
    missing = tl.zeros([], dtype=tl.int32)
    in_registers = CAPACITY > 0
    if CAPACITY > 0:
        entries = tl.arange(0, CAPACITY)
        if PARTS == 0:
            positions = entries
            keys = load_ordered(row_ptr, positions, num_keys)
            least = tl.min(tl.where(keys > 0, keys, 0xFFFFFFFF), 0)
        else:
            SHARE: tl.constexpr = CAPACITY // PARTS
            counts = tl.load(counts_ptr + row * PARTS + tl.arange(0, PARTS))
            total = tl.sum(counts, 0)
            least = tl.load(least_ptr + row).to(tl.uint32, bitcast=True)
            in_registers = ((least == 1) | (total >= k)) & (total <= CAPACITY)
            if tl.max(counts, 0) <= SHARE:
                # Each part has room of its own, of which it leaves some.
                there = entries % SHARE < tl.load(counts_ptr + row * PARTS + entries // SHARE)
                place = entries // SHARE * BLOCK + entries % SHARE
            else:
                there = entries < tl.where(in_registers, total, 0)
                place = entries
                behind = tl.zeros([], dtype=tl.int32)
                for one in range(PARTS - 1):
                    count = tl.load(counts_ptr + row * PARTS + one)
                    behind += count
                    place += tl.where(entries >= behind, BLOCK - count, 0)
            source = row * PARTS * BLOCK + place
            keys = tl.load(keys_ptr + source, mask=there, other=0).to(tl.uint32, bitcast=True)
            positions = tl.load(positions_ptr + source, mask=there, other=0)
        if in_registers:
            threshold = kth_largest(keys, least, k, 0)
            missing = k - tl.sum((keys > threshold).to(tl.int32), 0)
            above, equal = _store_slots(out_ptr, pages_ptr, positions, keys, threshold, missing, above, equal, page_size, PAGED)
    if not in_registers:
        row_best, row_missing = row_threshold(row_ptr, num_keys, k, BLOCK)
        missing += row_missing
        for start in range(0, num_keys, BLOCK):
            block = start + tl.arange(0, BLOCK)
            block_keys = load_ordered(row_ptr, block, num_keys)
            above, equal = _store_slots(
                out_ptr, pages_ptr, block, block_keys, row_best, row_missing, above, equal, page_size, PAGED
            )
    for start in range(above + tl.minimum(equal, missing), k, BLOCK):
        rest = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + rest, tl.full([BLOCK], -1, dtype=tl.int32), mask=rest < k)


@dataclass(frozen=True, slots=True)
class ChoiceConfig:
    """How a row is chosen from.

    Attributes:
        capacity: entries that a program chooses among at once; 0 where the row is read block by block.
        parts: programs that nominate for a row; 0 where the whole row fits.
        sample, rank: the sample's size, and which of it is the least that is nominated.
        block: entries of a part, or of a block of a program that reads a row.
        num_warps: of a program that chooses.
    """

    capacity: int
    parts: int
    sample: int
    rank: int
    block: int
    num_warps: int


_ROWS_AT_ONCE = 256
"""Rows that are nominated from before they are chosen from: they share a work space of twice their scores."""
_SIZES = (8192, 16384)
_SAMPLE = 2048
_BLOCK = 2048
_MOST_PARTS = 16
_INTERPRETED_SIZES = (64, 256)
_INTERPRETED_SAMPLE = 32
_INTERPRETED_BLOCK = 64
_SIGMAS = 5.0


@functools.lru_cache(maxsize=4096)
def choice_config(num_keys: int, k: int, *, interpreted: bool = False) -> ChoiceConfig:
    """Plan a choice of k among ``num_keys`` entries."""
    sizes, sample, least_block = (_SIZES, _SAMPLE, _BLOCK)
    if interpreted:
        sizes, sample, least_block = (_INTERPRETED_SIZES, _INTERPRETED_SAMPLE, _INTERPRETED_BLOCK)
    if num_keys <= sizes[0]:
        capacity = power_of_two(num_keys, min(256, sizes[0]), sizes[0])
        return ChoiceConfig(capacity, 0, 0, 0, capacity, max(1, min(16, capacity // 512)))
    # Of the sample so many are expected above the k-th best; those nominated are the row's share of some standard deviations more.
    expected = sample * k / num_keys
    rank = math.ceil(expected + _SIGMAS * math.sqrt(expected) + 1)
    nominated = rank * num_keys / sample
    for capacity in sizes:
        if nominated * (1 + 3 / math.sqrt(rank)) <= capacity:
            block = power_of_two(-(-num_keys // _MOST_PARTS), least_block, 4 * least_block)
            parts = power_of_two(-(-num_keys // block), 1, capacity)
            return ChoiceConfig(capacity, parts, sample, rank, block, max(1, min(16, capacity // 512)))
    return ChoiceConfig(0, 0, 0, 0, least_block, 8)


def topk_slots(
    scores: torch.Tensor,
    k: int,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.dsa.topk_slots`."""
    num_tokens, num_keys = scores.shape
    if out is None:
        out = torch.empty((num_tokens, k), dtype=torch.int32, device=scores.device)
    if num_tokens == 0:
        return out
    config = choice_config(num_keys, k, interpreted=scores.device.type == "cpu")
    # A tensor that is not used still needs an address.
    table, offsets, num_reqs = out, out, 0
    if page_table is not None and cu_seqlens_q is not None:
        table, offsets, num_reqs = unit_columns(page_table), cu_seqlens_q.contiguous(), page_table.shape[0]
    rows = num_tokens
    least = keys = positions = counts = out
    if config.parts > 0:
        rows = min(num_tokens, _ROWS_AT_ONCE)
        parts = rows * config.parts
        space = torch.empty(2 * parts * config.block + parts + rows, dtype=torch.int32, device=scores.device)
        keys, positions, counts, least = space.split((parts * config.block, parts * config.block, parts, rows))
    for first_row in range(0, num_tokens, rows):
        some, target = scores, out
        if rows < num_tokens:
            some, target = scores[first_row : first_row + rows], out[first_row : first_row + rows]
        if config.parts > 0:
            _sample_kernel[(some.shape[0],)](
                some, least, num_keys, config.rank, scores.stride(0), SAMPLE=config.sample, num_warps=NOMINATING_WARPS
            )
            _nominate_kernel[(some.shape[0], config.parts)](
                some, least, keys, positions, counts, num_keys, scores.stride(0),
                PARTS=config.parts, BLOCK=config.block, num_warps=NOMINATING_WARPS,
            )  # fmt: skip
        _choose_kernel[(some.shape[0],)](
            some, target, table, offsets, least, keys, positions, counts, num_reqs, num_keys, k, page_size, first_row,
            scores.stride(0), out.stride(0), table.stride(0),
            PAGED=page_table is not None, PARTS=config.parts, CAPACITY=config.capacity, BLOCK=config.block,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out

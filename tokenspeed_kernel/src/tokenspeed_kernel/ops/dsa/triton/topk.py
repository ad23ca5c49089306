"""Choice of the best scores, in Triton: one program finds a row's threshold digit by digit, then packs what passes it.

A score becomes an unsigned integer of the same order. Four passes count its digits of eight bits among the entries that agree with
the threshold so far; a fifth writes the positions above the threshold, and the first of those equal to it, in order. Nothing is
atomic between programs, so the result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.triton.tuning import unit_columns

__all__ = ["topk_slots"]

_BLOCK = 2048
_INTERPRETED_BLOCK = 64


@triton.jit
def _load_keys(row_ptr, start, num_keys, BLOCK: tl.constexpr):
    """(positions, ordered keys, which entries may be chosen) of one block."""
    positions = start + tl.arange(0, BLOCK)
    scores = tl.load(row_ptr + positions, mask=positions < num_keys, other=float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)  # -0.0 and 0.0 are equal
    keys = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return positions, keys, scores > float("-inf")  # false for NaN


@triton.jit(do_not_specialize=["num_reqs", "num_keys", "k", "page_size"])
def _topk_kernel(
    scores_ptr, out_ptr, pages_ptr, cu_q_ptr, num_reqs, num_keys, k, page_size, scores_row, out_row, pages_row,
    PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * scores_row
    out_ptr += row * out_row
    eligible = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_keys, BLOCK):
        _, _, may = _load_keys(row_ptr, start, num_keys, BLOCK)
        eligible += may.to(tl.int32)
    # With no more entries than k all are above a threshold of 0, and none equals it.
    threshold = tl.zeros([], dtype=tl.uint32)
    missing = tl.zeros([], dtype=tl.int32)
    if tl.sum(eligible, 0) > k:
        missing += k
        digits = tl.arange(0, 256)
        for step in tl.static_range(4):
            counts = tl.zeros([256], dtype=tl.int32)
            for start in range(0, num_keys, BLOCK):
                _, keys, may = _load_keys(row_ptr, start, num_keys, BLOCK)
                if step > 0:
                    may = may & ((keys >> (32 - 8 * step)) == (threshold >> (32 - 8 * step)))
                counts += tl.histogram(((keys >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=may)
            at_least = tl.cumsum(counts, 0, reverse=True)
            digit = tl.max(tl.where(at_least >= missing, digits, 0), 0)
            missing -= tl.sum(tl.where(digits > digit, counts, 0), 0)
            threshold = threshold | (digit.to(tl.uint32) << (24 - 8 * step))
    if PAGED:
        low, high = 0, num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_q_ptr + middle) <= row:
                low = middle
            else:
                high = middle
        request = low + tl.zeros([], tl.int64)
        pages_ptr += request * pages_row
    written = tl.zeros([], dtype=tl.int32)
    equal_before = tl.zeros([], dtype=tl.int32)
    for start in range(0, num_keys, BLOCK):
        positions, keys, may = _load_keys(row_ptr, start, num_keys, BLOCK)
        equal = (may & (keys == threshold)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0)
        taken = may & ((keys > threshold) | ((equal > 0) & (rank <= missing)))
        place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        slots = positions
        if PAGED:
            page = tl.load(pages_ptr + positions // page_size, mask=taken, other=-1).to(tl.int64)
            slot = page * page_size + positions % page_size
            slots = tl.where((page >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)
        tl.store(out_ptr + place, slots, mask=taken)
        written += tl.sum(taken.to(tl.int32), 0)
        equal_before += tl.sum(equal, 0)
    for start in range(written, k, BLOCK):
        rest = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + rest, tl.full([BLOCK], -1, dtype=tl.int32), mask=rest < k)


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
    if num_tokens > 0:
        block = min(_INTERPRETED_BLOCK if scores.device.type == "cpu" else _BLOCK, triton.next_power_of_2(max(num_keys, 256)))
        # A tensor that is not used still needs an address.
        table, offsets, num_reqs = out, out, 0
        if page_table is not None and cu_seqlens_q is not None:
            table, offsets, num_reqs = unit_columns(page_table), cu_seqlens_q.contiguous(), page_table.shape[0]
        _topk_kernel[(num_tokens,)](
            scores, out, table, offsets, num_reqs, num_keys, k, page_size, scores.stride(0), out.stride(0), table.stride(0),
            PAGED=page_table is not None, BLOCK=block, num_warps=8 if block >= _BLOCK else 4,
        )  # fmt: skip
    return out

"""The k-th best of some scores, in Triton: what the programs of `topk` share.

A score becomes an unsigned integer of the same order, and 0 where it may not be chosen. Among entries that lie in registers the
k-th largest is searched between two scores: it is guessed from how many entries reach either, as if these were spread evenly, and
now and then the middle is taken, so that the search ends whatever they are. A row that does not fit is read for each digit of eight
bits.

Source: the Illinois variant of false position, M. Dowell and P. Jarratt, BIT 11 (1971), 168-174.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["kth_largest", "load_ordered", "ordered", "row_threshold"]


@triton.jit
def ordered(scores):
    """Integers in the order of the scores; 0, which no score has, for -inf and NaN."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)  # -0.0 and 0.0 are equal
    keys = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(scores > float("-inf"), keys, 0)  # false for NaN


@triton.jit
def load_ordered(row_ptr, positions, num_keys):
    """`ordered` of a row's scores at some positions; 0 behind its end."""
    return ordered(tl.load(row_ptr + positions, mask=positions < num_keys, other=float("-inf")))


@triton.jit
def _score_of(key):
    """The score of an ordered integer."""
    return tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(keys, least, k, slack):
    """An integer that k to k + slack keys reach; the k-th largest key where ties leave none.

    No key but 0 is below `least`, which is the result with no more than k others.
    """
    count = tl.sum((keys > 0).to(tl.int32), 0)
    low = least
    if count > k + slack:
        high = tl.max(keys, 0) + 1  # the integer of infinity is less than the largest there is
        above = tl.zeros([], dtype=tl.int32)
        steps = tl.zeros([], dtype=tl.int32)
        last = tl.zeros([], dtype=tl.int32)  # which end moved: 1 the low one, 2 the high one
        low_weight = tl.full([], 1.0, dtype=tl.float32)
        high_weight = tl.full([], 1.0, dtype=tl.float32)
        aim = k + 0.5 * slack + 0.5
        # `count` keys reach low, at least k; `above` reach high, fewer than k.
        while (high - low > 1) & (count > k + slack):
            steps += 1
            surplus, deficit = (count - aim) * low_weight, (aim - above) * high_weight
            low_score = _score_of(low)
            guess = ordered(low_score + (_score_of(high) - low_score) * (surplus / (surplus + deficit)))
            pivot = tl.where(steps % 8 == 0, low + (high - low) // 2, tl.minimum(tl.maximum(guess, low + 1), high - 1))
            reached = tl.sum((keys >= pivot).to(tl.int32), 0)
            enough = reached >= k
            # An end that stays twice counts half, so that the other does not creep.
            low_weight = tl.where(enough, 1.0, tl.where(last == 2, low_weight * 0.5, 1.0))
            high_weight = tl.where(enough, tl.where(last == 1, high_weight * 0.5, 1.0), 1.0)
            last = tl.where(enough, 1, 2)
            low = tl.where(enough, pivot, low)
            count = tl.where(enough, reached, count)
            high = tl.where(enough, high, pivot)
            above = tl.where(enough, above, reached)
    return low


@triton.jit
def row_threshold(row_ptr, num_keys, k, BLOCK: tl.constexpr):
    """(the k-th largest of a row, how many entries equal to it are to be chosen); the row is read for each of four digits."""
    eligible = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_keys, BLOCK):
        eligible += (load_ordered(row_ptr, start + tl.arange(0, BLOCK), num_keys) > 0).to(tl.int32)
    # With no more entries than k all are above a threshold of 0, and none equals it.
    threshold = tl.zeros([], dtype=tl.uint32)
    missing = tl.zeros([], dtype=tl.int32)
    if tl.sum(eligible, 0) > k:
        missing += k
        digits = tl.arange(0, 256)
        for step in tl.static_range(4):
            counts = tl.zeros([256], dtype=tl.int32)
            for start in range(0, num_keys, BLOCK):
                keys = load_ordered(row_ptr, start + tl.arange(0, BLOCK), num_keys)
                may = keys > 0
                if step > 0:
                    may = may & ((keys >> (32 - 8 * step)) == (threshold >> (32 - 8 * step)))
                counts += tl.histogram(((keys >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=may)
            at_least = tl.cumsum(counts, 0, reverse=True)
            digit = tl.max(tl.where(at_least >= missing, digits, 0), 0)
            missing -= tl.sum(tl.where(digits > digit, counts, 0), 0)
            threshold = threshold | (digit.to(tl.uint32) << (24 - 8 * step))
    return threshold, missing

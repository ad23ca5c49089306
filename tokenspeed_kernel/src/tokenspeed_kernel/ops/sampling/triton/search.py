"""Weights of a row, and the search for the end of a prefix of the total order, in Triton.

A weight is exp((logit - max) / temperature) in units of 2**-40, an integer: sums are exact in any order. A prefix that reaches a
target ends at some logit; the search narrows the interval in which it lies, several pivots at each pass over the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SCALE = tl.constexpr(1099511627776.0)  # 2**40
_PIVOTS = tl.constexpr(4)  # more shorten the search but cost registers: 4 needed the fewest instructions in all


@triton.jit
def ordered_key(x):
    """Integer that orders as the float does; -0.0 and 0.0 are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of_key(key):
    """Inverse of `ordered_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK: tl.constexpr):
    """Ids and logits of one block; -inf past the end."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids.to(tl.int64) * column_stride, mask=ids < vocab_size, other=float("-inf"))
    return ids, x.to(tl.float32)


@triton.jit
def integer_weight(x, top, inverse_temperature):
    """Weight of a logit, int64."""
    return (tl.exp((x - top) * inverse_temperature) * _SCALE).to(tl.int64)


@triton.jit
def row_totals(logits_ptr, vocab_size, column_stride, top, inverse_temperature, BLOCK: tl.constexpr):
    """Mass, number and lowest key of the tokens that have a weight."""
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    low = tl.full([BLOCK], 0x7FFFFFFF, dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        _, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
        weight = integer_weight(x, top, inverse_temperature)
        mass += weight
        count += (weight > 0).to(tl.int32)
        low = tl.minimum(low, tl.where(weight > 0, ordered_key(x), 0x7FFFFFFF))
    return tl.sum(mass, axis=0), tl.sum(count, axis=0).to(tl.int64), tl.min(low, axis=0)


@triton.jit
def mass_above(logits_ptr, vocab_size, column_stride, top, inverse_temperature, cut, limit, BLOCK: tl.constexpr):
    """Mass of the tokens whose key is above `cut` and whose distance from the maximum is at most `limit` nats."""
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK):
        _, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
        keep = (ordered_key(x) > cut) & ((top - x) * inverse_temperature <= limit)
        mass += tl.where(keep, integer_weight(x, top, inverse_temperature), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def prefix_end(
    logits_ptr, vocab_size, column_stride, top, inverse_temperature, lowest, target,
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key at which the shortest prefix that reaches `target` ends, and the measure of the tokens above that key.

    The measure is the number of tokens with a weight, or their mass. Those from the key `lowest` on must reach the target.
    """
    low = lowest  # the tokens from here on reach the target
    high = ordered_key(top) + 1  # those from here on do not
    above = target * 0  # measure of the tokens from `high` on
    steps = tl.arange(0, _PIVOTS) + 1
    by_value = 1
    while high.to(tl.int64) - low.to(tl.int64) > 1:
        # Even steps in value suit logits of one sign and size; even steps in key space end the search whatever they are.
        wide_low = low.to(tl.int64)
        wide_high = high.to(tl.int64)
        low_value = value_of_key(low)
        even_values = low_value + (value_of_key(high) - low_value) * (steps.to(tl.float32) / (_PIVOTS + 1))
        even_keys = wide_low + (wide_high - wide_low) * steps // (_PIVOTS + 1)
        wide = tl.where(by_value != 0, ordered_key(even_values).to(tl.int64), even_keys)
        pivots = tl.minimum(tl.maximum(wide, wide_low + 1), wide_high - 1).to(tl.int32)
        by_value = 1 - by_value
        measured = tl.zeros([_PIVOTS], dtype=tl.int64)
        # The end is the key of a token: the interval shrinks to those that are in it, and is done when only one key is.
        first = tl.full([BLOCK], 0x7FFFFFFF, dtype=tl.int32)
        last = tl.full([BLOCK], -0x80000000, dtype=tl.int32)
        for start in range(0, vocab_size, BLOCK):
            _, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
            key = ordered_key(x)
            inside = (key >= low) & (key < high)
            first = tl.minimum(first, tl.where(inside, key, 0x7FFFFFFF))
            last = tl.maximum(last, tl.where(inside, key, -0x80000000))
            weight = integer_weight(x, top, inverse_temperature)
            if BY_COUNT:
                weight = (weight > 0).to(tl.int64)
            measured += tl.sum(tl.where(key[:, None] >= pivots[None, :], weight[:, None], 0), axis=0)
        enough = measured >= target
        low = tl.maximum(tl.maximum(low, tl.min(first, axis=0)), tl.max(tl.where(enough, pivots, low), axis=0))
        high = tl.minimum(tl.minimum(high, tl.max(last, axis=0) + 1), tl.min(tl.where(enough, high, pivots), axis=0))
        above = tl.maximum(above, tl.max(tl.where(enough, above, measured), axis=0))
    return low, above

"""Device functions that the attention kernels share: where keys lie, the online softmax, and its end.

Logits are kept in base 2: exp2 is one instruction. A row's running maximum may be -inf (nothing seen yet); then 0 takes its place
in differences, because -inf - -inf is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.ops.kvcache.triton.fp8 import decode_e4m3

__all__ = ["attend_keys", "finish_rows"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _soft_cap(logits, cap):
    # tanh(x) = 2 / (1 + exp(-2x)) - 1, which saturates without overflow.
    return cap * (2.0 / (1.0 + tl.exp2(logits * (-2.0 * _LOG2E / cap))) - 1.0)


@triton.jit
def attend_keys(
    q, rows_max, rows_sum, acc, positions,
    k_ptr, v_ptr, pages_ptr, start, first_key, last_key, num_pages,
    k_page, k_token, v_page, v_token, dims, scale, cap, window,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, EDGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add keys [start, start + BLOCK_N) to the rows' softmax.

    Keys outside [first_key, last_key), or on an invalid page, are not read: what lies there may be NaN. EDGE says that some row
    does not see all of the keys; last_key lies within the page table. k_ptr and v_ptr point at the head, pages_ptr at the
    request's row of the page table.
    """
    keys = start + tl.arange(0, BLOCK_N)
    if PAGED:
        if ONE_PAGE:  # the tile lies in one page: its address is a scalar
            page = tl.load(pages_ptr + start // PAGE_SIZE)
            last_key = tl.where((page >= 0) & (page < num_pages), last_key, start)
            valid = (keys >= first_key) & (keys < last_key)
        else:
            valid = (keys >= first_key) & (keys < last_key)
            page = tl.load(pages_ptr + keys // PAGE_SIZE, mask=valid, other=-1)
            valid = valid & (page >= 0) & (page < num_pages)
        page = page.to(tl.int64)  # page * stride passes 2**31 elements in a large pool
        offset = keys % PAGE_SIZE
        k_rows = page * k_page + offset * k_token
        v_rows = page * v_page + offset * v_token
    else:
        valid = (keys >= first_key) & (keys < last_key)
        k_rows = keys.to(tl.int64) * k_token
        v_rows = keys.to(tl.int64) * v_token
    if HEAD_DIM == BLOCK_D:
        mask = valid[:, None]
    else:
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + k_rows[:, None] + dims[None, :], mask=mask, other=0)
    if k_ptr.dtype.element_ty == tl.uint8:
        k = decode_e4m3(k).to(q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP:
        logits = _soft_cap(logits, cap)
    logits *= _LOG2E
    seen = valid[None, :]
    if EDGE:
        if CAUSAL:
            seen = seen & (keys[None, :] <= positions[:, None])
        if WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - window)
    logits = tl.where(seen, logits, float("-inf"))
    new_max = tl.maximum(rows_max, tl.max(logits, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(rows_max - base)
    weights = tl.exp2(logits - base[:, None])
    rows_sum = rows_sum * shrink + tl.sum(weights, 1)
    v = tl.load(v_ptr + v_rows[:, None] + dims[None, :], mask=mask, other=0)
    if v_ptr.dtype.element_ty == tl.uint8:
        v = decode_e4m3(v).to(q.dtype)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, rows_sum, acc


@triton.jit
def finish_rows(rows_max, rows_sum, acc, sinks, SINKS: tl.constexpr):
    """Divide by the denominator: (outputs, LSE base e). A row without any term gives 0 and -inf."""
    if SINKS:
        sinks = sinks * _LOG2E
        new_max = tl.maximum(rows_max, sinks)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.exp2(rows_max - base)
        rows_sum = rows_sum * shrink + tl.exp2(sinks - base)
        acc = acc * shrink[:, None]
        rows_max = new_max
    empty = rows_sum == 0.0
    rows_sum = tl.where(empty, 1.0, rows_sum)
    acc = acc / rows_sum[:, None]
    lse = tl.where(empty, float("-inf"), (rows_max + tl.log2(rows_sum)) * _LN2)
    return acc, lse

"""Device functions that the kernels share: where a chunk lies, and sums of logarithmic decays inside of it."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["find_chunk", "l2_normalized", "request_rows", "sums_between", "sums_until_end"]


@triton.jit
def find_chunk(place, bounds_ptr, num_reqs, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Request, first row, end of the request's rows and number within the request of chunk `place` of a ragged batch.

    Each request has its own chunks; a place beyond the last chunk gives request >= num_reqs. Looked up on the device, so that
    nobody waits for the lengths.
    """
    index = tl.arange(0, BLOCK_R)
    inside = index < num_reqs
    first = tl.load(bounds_ptr + index, mask=inside, other=0)
    last = tl.load(bounds_ptr + index + 1, mask=inside, other=0)
    counts = (last - first + CHUNK - 1) // CHUNK
    ends = tl.cumsum(counts, 0)
    request = tl.sum((ends <= place).to(tl.int32), 0)
    mine = index == request
    chunk = place - tl.sum(tl.where(mine, ends - counts, 0), 0)
    start = tl.sum(tl.where(mine, first, 0), 0) + chunk * CHUNK
    return request, start, tl.sum(tl.where(mine, last, 0), 0), chunk


@triton.jit
def request_rows(request, bounds_ptr, slots_ptr, slot_step, num_slots):
    """First row, end and slot (-1 where it is outside the pool) of a request of a ragged batch."""
    slot = tl.load(slots_ptr + request * slot_step).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, -1)
    return tl.load(bounds_ptr + request), tl.load(bounds_ptr + request + 1), slot


@triton.jit
def sums_between(logs, CHUNK: tl.constexpr):
    """[C] to [C, C]: entry (i, j) is the sum of logs j + 1 to i, -inf above the diagonal.

    Summed, not taken as a difference of running sums: after one very strong decay such differences have lost what follows.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    sums = tl.cumsum(tl.where(row > column, logs[:, None], 0.0), 0)
    return tl.where(row >= column, sums, float("-inf"))


@triton.jit
def sums_until_end(logs_ptr, rows, step, end, stop):
    """[C]: the sum of the logs after each row, up to `stop` and to the request's end."""
    after = rows + 1
    later = tl.load(logs_ptr + after * step, mask=(after < end) & (after < stop), other=0.0).to(tl.float32)
    return tl.cumsum(later, 0, reverse=True)


@triton.jit
def l2_normalized(x):
    """Divide rows by their Euclidean length; float32."""
    x = x.to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, 1) + 1e-6)[:, None]

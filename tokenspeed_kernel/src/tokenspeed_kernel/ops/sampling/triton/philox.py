"""Philox-4x32-10 in Triton: one lane a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def _philox_kernel(
    seeds_ptr, counters_ptr, out_ptr, stream, num_rows, seed_stride, counter_stride, out_stride, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    seeds = tl.load(seeds_ptr + rows.to(tl.int64) * seed_stride, mask=mask, other=0)
    counters = tl.load(counters_ptr + rows.to(tl.int64) * counter_stride, mask=mask, other=0)
    low = tl.full([BLOCK], 0xFFFFFFFF, dtype=tl.int64)
    k0 = (seeds & low).to(tl.uint32)
    k1 = ((seeds >> 32) & low).to(tl.uint32)
    c0 = (counters & low).to(tl.uint32)
    c1 = ((counters >> 32) & low).to(tl.uint32)
    c2 = (tl.zeros([BLOCK], dtype=tl.int64) + stream).to(tl.uint32)
    c3 = tl.zeros([BLOCK], dtype=tl.uint32)
    # Not tl.philox: that one has the two multipliers exchanged.
    m0 = tl.full([BLOCK], 0xD2511F53, dtype=tl.uint32)
    m1 = tl.full([BLOCK], 0xCD9E8D57, dtype=tl.uint32)
    w0 = tl.full([BLOCK], 0x9E3779B9, dtype=tl.uint32)
    w1 = tl.full([BLOCK], 0xBB67AE85, dtype=tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    bits = ((c0 >> 5).to(tl.int64) << 26) + (c1 >> 6).to(tl.int64)
    value = bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(out_ptr + rows.to(tl.int64) * out_stride, value, mask=mask)


def triton_philox_uniform(seeds: Tensor, counters: Tensor, stream: int, out: Tensor) -> Tensor:
    """See `tokenspeed_kernel.ops.sampling.philox_uniform`."""
    num_rows = len(seeds)
    if num_rows:
        _philox_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            seeds, counters, out, stream, num_rows, seeds.stride(0), counters.stride(0), out.stride(0),
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out

"""A kernel that reads and adds up: what a device's memory gives."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["sum_kernel"]


@triton.jit(do_not_specialize=["num_blocks"])
def sum_kernel(data_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):
    """Each program adds up every so many blocks of the data, whose size is a multiple of BLOCK."""
    program = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(program, num_blocks, tl.num_programs(0)):
        acc += tl.load(data_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums_ptr + program, tl.sum(acc, 0))

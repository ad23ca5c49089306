"""Argmax in Triton: one program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.triton.blocks import launch_size

_INVALID = tl.constexpr(INVALID_TOKEN)


@triton.jit
def first_in_row(logits_ptr, vocab_size, column_stride, BLOCK: tl.constexpr):
    """Value and id of the first token of the total order, and whether the row can be sampled."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_id = tl.zeros([BLOCK], dtype=tl.int32)
    broken = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        x = tl.load(logits_ptr + ids.to(tl.int64) * column_stride, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        broken |= (x != x).to(tl.int32)
        better = x > best  # strict: each lane keeps its lowest id; false for a NaN
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_id, vocab_size), axis=0)
    valid = (tl.max(broken, axis=0) == 0) & (top > float("-inf")) & (top < float("inf"))
    return top, token, valid


@triton.jit
def _argmax_kernel(logits_ptr, out_ptr, vocab_size, row_stride, column_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, token, valid = first_in_row(logits_ptr + row * row_stride, vocab_size, column_stride, BLOCK)
    tl.store(out_ptr + row * out_stride, tl.where(valid, token, _INVALID))


def triton_argmax(logits: Tensor, out: Tensor) -> Tensor:
    """See `tokenspeed_kernel.ops.sampling.argmax`."""
    num_rows, vocab_size = logits.shape
    if num_rows:
        block, num_warps = launch_size(vocab_size)
        _argmax_kernel[(num_rows,)](
            logits, out, vocab_size, *logits.stride(), out.stride(0), BLOCK=block, num_warps=num_warps
        )  # fmt: skip
    return out

"""Penalties and biases in Triton: one program a row walks that row's list."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _penalised(value, count, presence, frequency, repetition):
    value = tl.where(value > 0, value / repetition, value * repetition)
    return value - count.to(tl.float32) * frequency - tl.where(count > 0, presence, 0.0)


@triton.jit
def _penalties_kernel(
    logits_ptr, row_offsets_ptr, token_ids_ptr, counts_ptr, presence_ptr, frequency_ptr, repetition_ptr, pending_ptr,
    vocab_size, row_stride, column_stride, offset_stride, id_stride, count_stride, presence_stride, frequency_stride,
    repetition_stride, pending_stride, HAS_PENDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    start = tl.load(row_offsets_ptr + row * offset_stride)
    end = tl.load(row_offsets_ptr + (row + 1) * offset_stride)
    presence = tl.load(presence_ptr + row * presence_stride)
    frequency = tl.load(frequency_ptr + row * frequency_stride)
    repetition = tl.load(repetition_ptr + row * repetition_stride)
    pending = tl.full([], -1, dtype=tl.int32)
    if HAS_PENDING:
        pending = tl.load(pending_ptr + row * pending_stride)
    lanes = tl.arange(0, BLOCK)
    listed = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(start, end, BLOCK):
        entries = (first + lanes).to(tl.int64)
        inside = entries < end
        ids = tl.load(token_ids_ptr + entries * id_stride, mask=inside, other=-1)
        counts = tl.load(counts_ptr + entries * count_stride, mask=inside, other=0)
        mask = inside & (ids >= 0) & (ids < vocab_size)
        matches = mask & (ids == pending)
        listed |= matches.to(tl.int32)
        counts += matches.to(tl.int32)
        places = logits_ptr + ids.to(tl.int64) * column_stride
        value = tl.load(places, mask=mask, other=0.0)
        tl.store(places, _penalised(value, counts, presence, frequency, repetition), mask=mask)
    if HAS_PENDING:
        # Nothing else in the row touches this logit: the token is not on the list.
        new = (pending >= 0) & (pending < vocab_size) & (tl.max(listed, axis=0) == 0)
        place = logits_ptr + pending.to(tl.int64) * column_stride
        value = tl.load(place, mask=new, other=0.0)
        one = pending * 0 + 1
        tl.store(place, _penalised(value, one, presence, frequency, repetition), mask=new)


@triton.jit
def _bias_kernel(
    logits_ptr, row_offsets_ptr, token_ids_ptr, bias_ptr,
    vocab_size, row_stride, column_stride, offset_stride, id_stride, bias_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(row_offsets_ptr + row * offset_stride)
    end = tl.load(row_offsets_ptr + (row + 1) * offset_stride)
    lanes = tl.arange(0, BLOCK)
    for first in range(start, end, BLOCK):
        entries = (first + lanes).to(tl.int64)
        inside = entries < end
        ids = tl.load(token_ids_ptr + entries * id_stride, mask=inside, other=-1)
        mask = inside & (ids >= 0) & (ids < vocab_size)
        places = logits_ptr + row * row_stride + ids.to(tl.int64) * column_stride
        value = tl.load(places, mask=mask, other=0.0)
        tl.store(places, value + tl.load(bias_ptr + entries * bias_stride, mask=mask, other=0.0), mask=mask)


def triton_apply_penalties(
    logits: Tensor,
    row_offsets: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    pending: Tensor | None,
    out: Tensor,
) -> Tensor:
    """See `tokenspeed_kernel.ops.sampling.apply_penalties`."""
    if out is not logits:
        out.copy_(logits)
    num_rows, vocab_size = out.shape
    if num_rows:
        later = presence if pending is None else pending  # a pointer that is not read needs some tensor
        vectors = (row_offsets, token_ids, output_counts, presence, frequency, repetition, later)
        _penalties_kernel[(num_rows,)](
            out, *vectors, vocab_size, *out.stride(), *(one.stride(0) for one in vectors),
            HAS_PENDING=pending is not None, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def triton_apply_logit_bias(logits: Tensor, row_offsets: Tensor, token_ids: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """See `tokenspeed_kernel.ops.sampling.apply_logit_bias`."""
    if out is not logits:
        out.copy_(logits)
    num_rows, vocab_size = out.shape
    if num_rows:
        vectors = (row_offsets, token_ids, bias)
        _bias_kernel[(num_rows,)](
            out, *vectors, vocab_size, *out.stride(), *(one.stride(0) for one in vectors), BLOCK=_BLOCK, num_warps=8
        )  # fmt: skip
    return out

"""Sampling in Triton: one program a row; rows do only the passes that their parameters need."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import GREEDY_TEMPERATURE, INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.triton.argmax import first_in_row
from tokenspeed_kernel.ops.sampling.triton.blocks import launch_size
from tokenspeed_kernel.ops.sampling.triton.search import (
    integer_weight,
    load_row_block,
    mass_above,
    ordered_key,
    prefix_end,
    row_totals,
    value_of_key,
)

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_INVALID = tl.constexpr(INVALID_TOKEN)
_EVERY_TIE = tl.constexpr(1 << 62)


@triton.jit
def kept_prefix(
    logits_ptr, vocab_size, column_stride, top, inverse_temperature, top_k, top_p, min_p, BLOCK: tl.constexpr
):  # fmt: skip
    """What the filters keep: keys above `cut`, the first `ties` tokens at `cut`, distances up to `limit`; and its mass."""
    mass, count, lowest = row_totals(logits_ptr, vocab_size, column_stride, top, inverse_temperature, BLOCK)
    ties = mass * 0 + _EVERY_TIE
    limit = tl.full([], float("inf"), dtype=tl.float32)
    cut = lowest - 1  # below every token with a weight: nothing is cut
    if (top_k > 0) & (top_k < count):
        target = top_k.to(tl.int64)
        cut, above = prefix_end(
            logits_ptr, vocab_size, column_stride, top, inverse_temperature, lowest, target, True, BLOCK
        )  # fmt: skip
        ties = target - above
        tied = integer_weight(value_of_key(cut), top, inverse_temperature)
        mass = mass_above(logits_ptr, vocab_size, column_stride, top, inverse_temperature, cut, limit, BLOCK)
        mass += ties * tied
    if top_p < 1:
        share = top_p.to(tl.float64) * mass.to(tl.float64)
        target = share.to(tl.int64)
        target += (target.to(tl.float64) < share).to(tl.int64)  # the ceiling
        target = tl.maximum(target, 1)
        cut, above = prefix_end(
            logits_ptr, vocab_size, column_stride, top, inverse_temperature, lowest, target, False, BLOCK
        )  # fmt: skip
        tied = integer_weight(value_of_key(cut), top, inverse_temperature)
        ties = (target - above + tied - 1) // tied
        mass = above + ties * tied
    if min_p > 0:
        limit = -tl.log(min_p)
        mass = mass_above(logits_ptr, vocab_size, column_stride, top, inverse_temperature, cut, limit, BLOCK)
        if ties < _EVERY_TIE:
            value = value_of_key(cut)
            if (top - value) * inverse_temperature <= limit:
                mass += ties * integer_weight(value, top, inverse_temperature)
    return cut, ties, limit, mass


@triton.jit
def kept_weight(x, top, inverse_temperature, cut, ties, limit, ties_before):
    """Weights of one block after the filters, and the ties at the cut seen so far."""
    key = ordered_key(x)
    near = (top - x) * inverse_temperature <= limit
    tie = (key == cut).to(tl.int64)
    keep = key > cut
    in_block = tl.sum(tie, axis=0)
    if in_block > 0:
        place = ties_before + tl.cumsum(tie, axis=0)
        keep |= (tie > 0) & (place <= ties)
    weight = tl.where(keep & near, integer_weight(x, top, inverse_temperature), 0)
    return weight, ties_before + in_block


@triton.jit
def _sample_kernel(
    logits_ptr, uniform_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr,
    vocab_size, row_stride, column_stride, uniform_stride, temperature_stride, top_k_stride, top_p_stride, min_p_stride,
    out_stride, rows_per_request, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    request = row // rows_per_request
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    top_k = tl.load(top_k_ptr + request * top_k_stride)
    top_p = tl.load(top_p_ptr + request * top_p_stride)
    min_p = tl.load(min_p_ptr + request * min_p_stride)
    top, token, valid = first_in_row(logits_ptr, vocab_size, column_stride, BLOCK)
    if valid & (temperature > _GREEDY) & (top_k != 1) & (top_p > 0):
        inverse = tl.div_rn(1.0, temperature)
        cut, ties, limit, mass = kept_prefix(
            logits_ptr, vocab_size, column_stride, top, inverse, top_k, top_p, min_p, BLOCK
        )  # fmt: skip
        uniform = tl.load(uniform_ptr + row * uniform_stride)
        mark = tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)
        start = 0
        found = vocab_size + 0
        running = mass * 0
        ties_before = mass * 0
        while (start < vocab_size) & (found >= vocab_size):
            ids, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
            weight, ties_before = kept_weight(x, top, inverse, cut, ties, limit, ties_before)
            reached = running + tl.sum(weight, axis=0)
            if reached > mark:
                passed = running + tl.cumsum(weight, axis=0) > mark
                found = tl.min(tl.where(passed, ids, vocab_size), axis=0)
            running = reached
            start += BLOCK
        token = found
    tl.store(out_ptr + row * out_stride, tl.where(valid, token, _INVALID))


@triton.jit
def _probs_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr,
    vocab_size, row_stride, column_stride, temperature_stride, top_k_stride, top_p_stride, min_p_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    out_ptr += row * vocab_size
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    top_k = tl.load(top_k_ptr + row * top_k_stride)
    top_p = tl.load(top_p_ptr + row * top_p_stride)
    min_p = tl.load(min_p_ptr + row * min_p_stride)
    top, token, valid = first_in_row(logits_ptr, vocab_size, column_stride, BLOCK)
    if valid & (temperature > _GREEDY) & (top_k != 1) & (top_p > 0):
        inverse = tl.div_rn(1.0, temperature)
        cut, ties, limit, mass = kept_prefix(
            logits_ptr, vocab_size, column_stride, top, inverse, top_k, top_p, min_p, BLOCK
        )  # fmt: skip
        ties_before = mass * 0
        for start in range(0, vocab_size, BLOCK):
            ids, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
            weight, ties_before = kept_weight(x, top, inverse, cut, ties, limit, ties_before)
            share = (weight.to(tl.float64) / mass.to(tl.float64)).to(tl.float32)
            tl.store(out_ptr + ids, share, mask=ids < vocab_size)
    else:
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.where(valid, tl.where(ids == token, 1.0, 0.0), float("nan"))
            tl.store(out_ptr + ids, value, mask=ids < vocab_size)


def triton_sample(
    logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor
) -> Tensor:
    """See `tokenspeed_kernel.ops.sampling.sample`."""
    sample_rows(logits, uniform, temperature, top_k, top_p, min_p, out, rows_per_request=1)
    return out


def sample_rows(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    out: Tensor,
    *,
    rows_per_request: int,
) -> None:
    """Draw a token for each row; so many successive rows share one request's filters."""
    num_rows, vocab_size = logits.shape
    if num_rows:
        block, num_warps = launch_size(vocab_size)
        vectors = (uniform, temperature, top_k, top_p, min_p, out)
        _sample_kernel[(num_rows,)](
            logits, *vectors, vocab_size, *logits.stride(), *(one.stride(0) for one in vectors), rows_per_request,
            BLOCK=block, num_warps=num_warps,
        )  # fmt: skip


def triton_sampling_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor) -> Tensor:
    """See `tokenspeed_kernel.ops.sampling.sampling_probs`."""
    num_rows, vocab_size = logits.shape
    if num_rows:
        block, num_warps = launch_size(vocab_size)
        vectors = (temperature, top_k, top_p, min_p)
        _probs_kernel[(num_rows,)](
            logits, *vectors, out, vocab_size, *logits.stride(), *(one.stride(0) for one in vectors),
            BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return out

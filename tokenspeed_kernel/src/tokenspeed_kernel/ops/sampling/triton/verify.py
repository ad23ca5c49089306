"""Verification of draft chains in Triton: a program for each position gives its token, then one for each request cuts the chain."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import GREEDY_TEMPERATURE, INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.triton.argmax import first_in_row
from tokenspeed_kernel.ops.sampling.triton.blocks import launch_size
from tokenspeed_kernel.ops.sampling.triton.sample import kept_prefix, kept_weight, sample_rows
from tokenspeed_kernel.ops.sampling.triton.search import load_row_block

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_INVALID = tl.constexpr(INVALID_TOKEN)
_UNITS = tl.constexpr(4503599627370496.0)  # 2**52: a distribution's sum, so that integers add exactly in any order


@triton.jit
def _left_over(weight, mass, proposed):
    """What the target's distribution has beyond the draft's, in units of 2**-52."""
    left = weight.to(tl.float64) / mass.to(tl.float64) - tl.where(proposed == proposed, proposed, 0.0)
    return (tl.maximum(left, 0.0) * _UNITS).to(tl.int64)


@triton.jit
def _reject_kernel(
    logits_ptr, draft_ids_ptr, uniform_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draft_probs_ptr,
    accept_uniform_ptr, out_ptr, positions, vocab_size, row_stride, column_stride, draft_stride0, draft_stride1,
    uniform_stride0, uniform_stride1, temperature_stride, top_k_stride, top_p_stride, min_p_stride, probs_stride0,
    probs_stride1, probs_stride2, accept_stride0, accept_stride1, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // positions
    place = row - request * positions
    logits_ptr += row * row_stride
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    top_k = tl.load(top_k_ptr + request * top_k_stride)
    top_p = tl.load(top_p_ptr + request * top_p_stride)
    min_p = tl.load(min_p_ptr + request * min_p_stride)
    top, token, valid = first_in_row(logits_ptr, vocab_size, column_stride, BLOCK)
    # A greedy position gives its first token whether or not that is the draft's.
    if valid & (temperature > _GREEDY) & (top_k != 1) & (top_p > 0):
        inverse = tl.div_rn(1.0, temperature)
        cut, ties, limit, mass = kept_prefix(
            logits_ptr, vocab_size, column_stride, top, inverse, top_k, top_p, min_p, BLOCK
        )  # fmt: skip
        has_draft = place < positions - 1
        draft = tl.load(draft_ids_ptr + request * draft_stride0 + place * draft_stride1, mask=has_draft, other=_INVALID)
        has_draft = (draft >= 0) & (draft < vocab_size)
        draft_probs_ptr += request * probs_stride0 + place * probs_stride1
        total = mass * 0
        accepted = has_draft & False
        if has_draft:
            share = mass * 0
            ties_before = mass * 0
            for start in range(0, vocab_size, BLOCK):
                ids, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
                weight, ties_before = kept_weight(x, top, inverse, cut, ties, limit, ties_before)
                share += tl.sum(tl.where(ids == draft, weight, 0), axis=0)
                proposed = tl.load(draft_probs_ptr + ids.to(tl.int64) * probs_stride2, mask=ids < vocab_size, other=0.0)
                total += tl.sum(_left_over(weight, mass, proposed.to(tl.float64)), axis=0)
            chance = tl.load(draft_probs_ptr + draft.to(tl.int64) * probs_stride2).to(tl.float64)
            chance *= tl.load(accept_uniform_ptr + request * accept_stride0 + place * accept_stride1)
            accepted = chance < share.to(tl.float64) / mass.to(tl.float64)
        if accepted:
            token = draft
        else:
            from_left = total > 0
            whole = tl.where(from_left, total, mass)
            proposed_size = tl.where(from_left, vocab_size, 0)  # without a draft nothing is read
            uniform = tl.load(uniform_ptr + request * uniform_stride0 + place * uniform_stride1)
            mark = tl.minimum((uniform * whole.to(tl.float64)).to(tl.int64), whole - 1)
            start = 0
            found = vocab_size + 0
            running = mass * 0
            ties_before = mass * 0
            while (start < vocab_size) & (found >= vocab_size):
                ids, x = load_row_block(logits_ptr, start, vocab_size, column_stride, BLOCK)
                weight, ties_before = kept_weight(x, top, inverse, cut, ties, limit, ties_before)
                proposed = tl.load(draft_probs_ptr + ids.to(tl.int64) * probs_stride2, mask=ids < proposed_size, other=0.0)
                left = _left_over(weight, mass, proposed.to(tl.float64))
                weight = tl.where(from_left, left, weight)
                reached = running + tl.sum(weight, axis=0)
                if reached > mark:
                    passed = running + tl.cumsum(weight, axis=0) > mark
                    found = tl.min(tl.where(passed, ids, vocab_size), axis=0)
                running = reached
                start += BLOCK
            token = found
    tl.store(out_ptr + row, tl.where(valid, token, _INVALID))


@triton.jit
def _cut_kernel(draft_ids_ptr, out_ptr, number_ptr, positions, vocab_size, draft_stride0, draft_stride1, number_stride):
    row = tl.program_id(0).to(tl.int64)
    draft_ids_ptr += row * draft_stride0
    out_ptr += row * positions
    going = row >= 0
    number = 0
    for place in range(positions):
        token = tl.load(out_ptr + place)
        tl.store(out_ptr + place, tl.where(going, token, _INVALID))
        number += (going & (token >= 0)).to(tl.int32)
        draft = tl.load(draft_ids_ptr + place * draft_stride1, mask=place < positions - 1, other=_INVALID)
        going = going & (draft >= 0) & (draft < vocab_size) & (draft == token)
    tl.store(number_ptr + row * number_stride, number)


def triton_verify_chain(
    logits: Tensor,
    draft_ids: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draft_probs: Tensor | None,
    accept_uniform: Tensor | None,
    out: Tensor,
    num_tokens_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.ops.sampling.verify_chain`."""
    num_rows, positions, vocab_size = logits.shape
    if not num_rows:
        return out, num_tokens_out
    rows = logits.flatten(0, 1)
    filters = (temperature, top_k, top_p, min_p)
    if draft_probs is None or accept_uniform is None:
        sample_rows(rows, uniform.flatten(), *filters, out.view(-1), rows_per_request=positions)
    else:
        block, num_warps = launch_size(vocab_size)
        _reject_kernel[(num_rows * positions,)](
            rows, draft_ids, uniform, *filters, draft_probs, accept_uniform, out, positions, vocab_size, *rows.stride(),
            *draft_ids.stride(), *uniform.stride(), *(one.stride(0) for one in filters), *draft_probs.stride(),
            *accept_uniform.stride(), BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    _cut_kernel[(num_rows,)](
        draft_ids, out, num_tokens_out, positions, vocab_size, *draft_ids.stride(), num_tokens_out.stride(0), num_warps=1
    )
    return out, num_tokens_out

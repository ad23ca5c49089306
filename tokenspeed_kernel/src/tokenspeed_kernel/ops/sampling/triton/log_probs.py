"""Log-probabilities in Triton: one program a row; each alternative is one more pass over the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.triton.argmax import first_in_row
from tokenspeed_kernel.ops.sampling.triton.blocks import launch_size

_INVALID = tl.constexpr(INVALID_TOKEN)


@triton.jit
def _log_probs_kernel(
    logits_ptr, token_ids_ptr, logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr,
    vocab_size, top_n, row_stride, column_stride, id_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lanes = tl.arange(0, BLOCK)
    top, first, valid = first_in_row(logits_ptr, vocab_size, column_stride, BLOCK)
    token = tl.load(token_ids_ptr + row * id_stride)
    known = (token >= 0) & (token < vocab_size)
    mine = tl.load(logits_ptr + token.to(tl.int64) * column_stride, mask=known, other=0.0).to(tl.float32)

    total = tl.zeros([BLOCK], dtype=tl.float32)
    ahead = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        mask = ids < vocab_size
        x = tl.load(logits_ptr + ids.to(tl.int64) * column_stride, mask=mask, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - top)
        ahead += (mask & ((x > mine) | ((x == mine) & (ids < token)))).to(tl.int32)
    log_total = tl.log(tl.sum(total, axis=0))
    nan = float("nan")
    tl.store(logprobs_ptr + row, tl.where(valid & known, mine - top - log_total, nan))
    tl.store(ranks_ptr + row, tl.where(valid & known, tl.sum(ahead, axis=0) + 1, 0))

    value = top
    last = first
    for place in range(top_n):
        if place > 0:
            # The first token after (value, last) in the total order; logits of -inf come last, by id.
            best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
            best_id = tl.zeros([BLOCK], dtype=tl.int32) + vocab_size
            for start in range(0, vocab_size, BLOCK):
                ids = start + lanes
                mask = ids < vocab_size
                x = tl.load(logits_ptr + ids.to(tl.int64) * column_stride, mask=mask, other=float("-inf")).to(tl.float32)
                after = mask & ((x < value) | ((x == value) & (ids > last)))
                better = after & ((x > best) | ((x == best) & (ids < best_id)))
                best = tl.where(better, x, best)
                best_id = tl.where(better, ids, best_id)
            value = tl.max(best, axis=0)
            last = tl.min(tl.where(best == value, best_id, vocab_size), axis=0)
        tl.store(top_ids_ptr + row * top_n + place, tl.where(valid, last, _INVALID))
        tl.store(top_logprobs_ptr + row * top_n + place, tl.where(valid, value - top - log_total, nan))


def triton_log_probs(logits: Tensor, token_ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `tokenspeed_kernel.ops.sampling.log_probs`."""
    num_rows, vocab_size = logits.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    top_ids = torch.empty(num_rows, top_n, dtype=torch.int32, device=logits.device)
    top_logprobs = torch.empty(num_rows, top_n, dtype=torch.float32, device=logits.device)
    if num_rows:
        block, num_warps = launch_size(vocab_size)
        _log_probs_kernel[(num_rows,)](
            logits, token_ids, logprobs, ranks, top_ids, top_logprobs,
            vocab_size, top_n, *logits.stride(), token_ids.stride(0), BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return logprobs, ranks, top_ids, top_logprobs

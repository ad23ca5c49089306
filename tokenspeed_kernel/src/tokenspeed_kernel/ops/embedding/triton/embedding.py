"""Embedding look-up in Triton: one program a token and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["embedding"]

_MAX_BLOCK = 2048


@triton.jit
def _embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, vocab, hidden, ids_step, weight_row, weight_col, out_row, out_col, BLOCK: tl.constexpr
):  # fmt: skip
    # An id times the row's stride passes 2**31 elements for large vocabularies.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row * ids_step).to(tl.int64)
    # Nothing is read for an id outside the table, and `other` fills the row.
    readable = tl.where((token >= 0) & (token < vocab), hidden, 0)
    values = tl.load(weight_ptr + token * weight_row + columns * weight_col, mask=columns < readable, other=0.0)
    tl.store(out_ptr + row * out_row + columns * out_col, values, mask=columns < hidden)


def embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`."""
    num_tokens = token_ids.shape[0]
    vocab, hidden = weight.shape
    if out is None:
        out = torch.empty((num_tokens, hidden), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    _embedding_kernel[(num_tokens, triton.cdiv(hidden, block))](
        token_ids, weight, out, vocab, hidden, token_ids.stride(0), *weight.stride(), *out.stride(),
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out

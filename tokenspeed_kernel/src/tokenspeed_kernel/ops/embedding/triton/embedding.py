"""Embedding look-up in Triton: one program a token and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.quantization.triton.tile import load_tile, operand, rounded_to
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["embedding", "embedding_scaled"]

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


@triton.jit
def _embedding_scaled_kernel(
    ids_ptr, data_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr, vocab, hidden,
    ids_step, data_row, data_col, scale_row, scale_col, zero_row, zero_col, out_row, out_col,
    KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    token = tl.load(ids_ptr + row * ids_step).to(tl.int64)
    tokens = token + tl.zeros([1], dtype=tl.int64)
    # Nothing is read for an id outside the table, and the tile is 0 there.
    values = load_tile(
        data_ptr, scale_ptr, zero_ptr, tokens, (tokens >= 0) & (tokens < vocab), start, hidden,
        data_row, data_col, scale_row, scale_col, zero_row, zero_col, KIND, SCALE, BLOCK_ROWS, BLOCK_COLS, 1, BLOCK,
    )  # fmt: skip
    if GLOBAL:
        values = values * tl.load(global_ptr)
    columns = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    target = out_ptr + row * out_row + columns * out_col
    tl.store(target, rounded_to(values, out_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty), mask=columns < hidden)


def embedding_scaled(
    token_ids: torch.Tensor, weight: QuantizedTensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`; the rows that are asked for are decoded, no others."""
    num_tokens, (vocab, hidden) = token_ids.shape[0], weight.shape
    if out is None:
        out = torch.empty((num_tokens, hidden), dtype=out_dtype, device=weight.device)
    if out.numel() == 0:
        return out
    parts = operand(weight)
    kind, how, block_rows, block_cols, has_global = parts.constants
    steps = [*parts.strides[1:3], *parts.strides[4:6], *parts.strides[7:9]]
    block = min(max(triton.next_power_of_2(hidden), 128), 1024)
    _embedding_scaled_kernel[(num_tokens, triton.cdiv(hidden, block))](
        token_ids, *parts.tensors, out, vocab, hidden, token_ids.stride(0), *steps, *out.stride(),
        KIND=kind, SCALE=how, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, GLOBAL=has_global, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out

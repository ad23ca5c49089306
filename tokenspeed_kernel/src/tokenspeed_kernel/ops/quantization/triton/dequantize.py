"""Dequantizing in Triton: one program a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.quantization.triton.tile import load_tile, operand, rounded_to
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["dequantize"]


@triton.jit
def _dequantize_kernel(
    data_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr, num_rows, num_columns,
    data_matrix, data_row, data_col, scale_matrix, scale_row, scale_col, zero_matrix, zero_row, zero_col,
    out_matrix, out_row, out_col,
    KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GLOBAL: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * DEPTH
    row_mask = rows < num_rows
    values = load_tile(
        data_ptr + matrix * data_matrix, scale_ptr + matrix * scale_matrix, zero_ptr + matrix * zero_matrix,
        rows, row_mask, start, num_columns, data_row, data_col, scale_row, scale_col, zero_row, zero_col,
        KIND, SCALE, BLOCK_ROWS, BLOCK_COLS, ROWS, DEPTH,
    )  # fmt: skip
    if GLOBAL:
        values = values * tl.load(global_ptr + matrix)
    columns = (start + tl.arange(0, DEPTH)).to(tl.int64)
    mask = row_mask[:, None] & (columns < num_columns)[None, :]
    target = out_ptr + matrix * out_matrix + rows[:, None] * out_row + columns[None, :] * out_col
    tl.store(target, rounded_to(values, out_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(
    tensor: QuantizedTensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.quantization.dequantize`."""
    if out is None:
        out = torch.empty(tensor.shape, dtype=out_dtype or torch.float32, device=tensor.device)
    if out.numel() == 0:
        return out
    if tensor.ndim > 3:
        for index in range(tensor.shape[0]):
            dequantize(tensor[index], out=out[index])
        return out
    parts = operand(tensor)
    num_rows, num_columns = tensor.shape[-2:]
    rows = 4
    # A multiple of every block's columns, but for the K formats, whose elements find their scales one by one.
    depth = min(256, max(128, triton.next_power_of_2(num_columns)))
    data, scale, zero, total = parts.tensors
    total = total.contiguous() if parts.constants[4] else total
    strides = (0, *out.stride()) if out.dim() == 2 else out.stride()
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, depth), tensor.shape[0] if tensor.ndim == 3 else 1)
    kind, how, block_rows, block_cols, has_global = parts.constants
    _dequantize_kernel[grid](
        data, scale, zero, total, out, num_rows, num_columns, *parts.strides, *strides,
        KIND=kind, SCALE=how, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, GLOBAL=has_global, ROWS=rows, DEPTH=depth,
    )  # fmt: skip
    return out

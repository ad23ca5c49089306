"""Matrix product in Triton with operands in any scaled format, decoded in the kernel."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.gemm.triton.product import choose_tiles, multiply_tile, prepared, product_constants
from tokenspeed_kernel.ops.quantization.triton.tile import operand
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm"]


@triton.jit
def _mm_scaled_kernel(
    x_ptr, x_scale_ptr, x_zero_ptr, x_global_ptr, w_ptr, w_scale_ptr, w_zero_ptr, w_global_ptr, bias_ptr, out_ptr,
    num_rows, out_features, in_features,
    x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
    w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col, bias_step, out_row, out_col,
    X_KIND: tl.constexpr, X_SCALE: tl.constexpr, X_BLOCK_ROWS: tl.constexpr, X_BLOCK_COLS: tl.constexpr,
    W_KIND: tl.constexpr, W_SCALE: tl.constexpr, W_BLOCK_ROWS: tl.constexpr, W_BLOCK_COLS: tl.constexpr,
    X_GLOBAL: tl.constexpr, W_GLOBAL: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs that follow each other take GROUP tiles down before the next column: they share weight tiles in the L2 cache.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    group_size = GROUP * tl.cdiv(out_features, FEATURES)
    first_row_tile = program // group_size * GROUP
    rows_in_group = tl.minimum(row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + program % group_size % rows_in_group
    feature_tile = program % group_size // rows_in_group
    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = feature_tile.to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    row_mask, feature_mask = rows < num_rows, features < out_features
    total = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    total = multiply_tile(
        total, rows, row_mask, features, feature_mask, 0, in_features, in_features,
        x_ptr, x_scale_ptr, x_zero_ptr, x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
        w_ptr, w_scale_ptr, w_zero_ptr, w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col,
        X_KIND, X_SCALE, X_BLOCK_ROWS, X_BLOCK_COLS, W_KIND, W_SCALE, W_BLOCK_ROWS, W_BLOCK_COLS,
        LATE, DOT, ROWS, FEATURES, DEPTH,
    )  # fmt: skip
    if X_GLOBAL:
        total *= tl.load(x_global_ptr)
    if W_GLOBAL:
        total *= tl.load(w_global_ptr)
    if HAS_BIAS:
        total += tl.load(bias_ptr + features * bias_step, mask=feature_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * out_row + features[None, :] * out_col
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & feature_mask[None, :])


def mm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`."""
    out_features, in_features = weight.shape
    shape = (*x.shape[:-1], out_features)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if isinstance(x, QuantizedTensor) and x.ndim > 2:
        for index in range(x.shape[0]):  # each matrix of the stack may have scales of its own
            mm(x[index], weight, bias, out=out[index], out_dtype=out_dtype)
        return out
    num_rows = math.prod(shape[:-1])
    rows = x.reshape(num_rows, in_features) if isinstance(x, torch.Tensor) else x
    # Rows of an output that have no common stride are written through a contiguous copy.
    direct = out.dim() == 2 or out.is_contiguous()
    target = out.view(-1, out_features) if out.is_contiguous() else out if direct else out.new_empty((num_rows, out_features))
    left, right = prepared(rows, weight, operand(rows), operand(weight))
    plain = rows.dtype if isinstance(rows, torch.Tensor) else None
    tiles = choose_tiles(num_rows, left, right, wide=plain is torch.float32, amd=torch.version.hip is not None)
    grid = (triton.cdiv(num_rows, tiles.rows) * triton.cdiv(out_features, tiles.features),)
    x_steps, w_steps = ([*one.strides[1:3], *one.strides[4:6], *one.strides[7:9]] for one in (left, right))
    _mm_scaled_kernel[grid](
        *left.tensors, *right.tensors, target if bias is None else bias, target, num_rows, out_features, in_features,
        *x_steps, *w_steps, 0 if bias is None else bias.stride(0), *target.stride(),
        **product_constants(left, right, plain, tiles), HAS_BIAS=bias is not None, GROUP=8,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out if direct else out.copy_(target.view(shape))

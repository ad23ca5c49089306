"""Products of stacks of matrices in Triton, in any formats: `bmm`, and the two forms for a mixture of experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.gemm.triton.product import choose_tiles, multiply_tile, prepared, product_constants
from tokenspeed_kernel.ops.quantization.triton.tile import operand
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["bmm", "grouped_mm_contiguous", "grouped_mm_masked"]


@triton.jit
def _batched_kernel(
    x_ptr, x_scale_ptr, x_zero_ptr, x_global_ptr, w_ptr, w_scale_ptr, w_zero_ptr, w_global_ptr, counts_ptr, out_ptr,
    num_rows, out_features, in_features,
    x_matrix, x_row, x_col, x_scale_matrix, x_scale_row, x_scale_col, x_zero_matrix, x_zero_row, x_zero_col,
    w_matrix, w_row, w_col, w_scale_matrix, w_scale_row, w_scale_col, w_zero_matrix, w_zero_row, w_zero_col,
    counts_step, out_matrix, out_row, out_col,
    X_KIND: tl.constexpr, X_SCALE: tl.constexpr, X_BLOCK_ROWS: tl.constexpr, X_BLOCK_COLS: tl.constexpr,
    W_KIND: tl.constexpr, W_SCALE: tl.constexpr, W_BLOCK_ROWS: tl.constexpr, W_BLOCK_COLS: tl.constexpr,
    X_GLOBAL: tl.constexpr, W_GLOBAL: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    feature_tiles = tl.cdiv(out_features, FEATURES)
    row_tile, feature_tile = tl.program_id(0) // feature_tiles, tl.program_id(0) % feature_tiles
    matrix = tl.program_id(1).to(tl.int64)
    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = feature_tile.to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    feature_mask = features < out_features
    count = num_rows
    if MASKED:
        count = tl.minimum(tl.load(counts_ptr + matrix * counts_step), num_rows).to(tl.int32)
    row_mask = rows < count
    total = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    # A tile without a row reads nothing, and writes zeros.
    depth = tl.where(row_tile * ROWS < count, in_features, 0)
    total = multiply_tile(
        total, rows, row_mask, features, feature_mask, 0, depth, in_features,
        x_ptr + matrix * x_matrix, x_scale_ptr + matrix * x_scale_matrix, x_zero_ptr + matrix * x_zero_matrix,
        x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
        w_ptr + matrix * w_matrix, w_scale_ptr + matrix * w_scale_matrix, w_zero_ptr + matrix * w_zero_matrix,
        w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col,
        X_KIND, X_SCALE, X_BLOCK_ROWS, X_BLOCK_COLS, W_KIND, W_SCALE, W_BLOCK_ROWS, W_BLOCK_COLS,
        LATE, DOT, ROWS, FEATURES, DEPTH,
    )  # fmt: skip
    if X_GLOBAL:
        total *= tl.load(x_global_ptr + matrix)
    if W_GLOBAL:
        total *= tl.load(w_global_ptr + matrix)
    # Rows beyond the count stay 0 even where a weight is NaN.
    total = tl.where(row_mask[:, None], total, 0.0)
    out_ptrs = out_ptr + matrix * out_matrix + rows[:, None] * out_row + features[None, :] * out_col
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & feature_mask[None, :])


@triton.jit
def _contiguous_kernel(
    x_ptr, x_scale_ptr, x_zero_ptr, x_global_ptr, w_ptr, w_scale_ptr, w_zero_ptr, w_global_ptr, owners_ptr, out_ptr,
    num_rows, out_features, in_features, num_experts,
    x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
    w_matrix, w_row, w_col, w_scale_matrix, w_scale_row, w_scale_col, w_zero_matrix, w_zero_row, w_zero_col,
    owners_step, out_row, out_col,
    X_KIND: tl.constexpr, X_SCALE: tl.constexpr, X_BLOCK_ROWS: tl.constexpr, X_BLOCK_COLS: tl.constexpr,
    W_KIND: tl.constexpr, W_SCALE: tl.constexpr, W_BLOCK_ROWS: tl.constexpr, W_BLOCK_COLS: tl.constexpr,
    X_GLOBAL: tl.constexpr, W_GLOBAL: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, BY_IDS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    # Programs that follow each other share the rows; those of one expert follow soon.
    feature_tiles = tl.cdiv(out_features, FEATURES)
    tile, feature_tile = tl.program_id(0) // feature_tiles, tl.program_id(0) % feature_tiles
    features = feature_tile.to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    feature_mask = features < out_features
    if BY_IDS:
        rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        present = rows < num_rows
        ids = tl.load(owners_ptr + rows * owners_step, mask=present, other=-1)
        known = (ids >= 0) & (ids < num_experts)
        owner = tl.where(known, ids, -1).to(tl.int32)
        first_expert = tl.min(tl.where(known, owner, num_experts), 0)
        last_expert = tl.max(owner, 0)
    else:
        # Which expert the tile belongs to: tiles are counted expert by expert, without waiting for the host.
        experts = tl.arange(0, EXPERTS)
        inside = experts < num_experts
        starts = tl.load(owners_ptr + experts.to(tl.int64) * owners_step, mask=inside, other=0)
        ends = tl.load(owners_ptr + (experts.to(tl.int64) + 1) * owners_step, mask=inside, other=0)
        starts = tl.minimum(tl.maximum(starts, 0), num_rows).to(tl.int32)
        ends = tl.minimum(tl.maximum(ends, 0), num_rows).to(tl.int32)
        tiles = (tl.maximum(ends - starts, 0) + ROWS - 1) // ROWS
        behind = tl.cumsum(tiles, 0)
        num_tiles = tl.max(behind, 0)
        expert = tl.sum((behind <= tile).to(tl.int32), 0)
        mine = experts == expert
        place = tile - tl.sum(tl.where(mine, behind - tiles, 0), 0)
        begin = tl.sum(tl.where(mine, starts, 0), 0) + place * ROWS
        end = tl.sum(tl.where(mine, ends, 0), 0)
        owned = tile < num_tiles
        # Tiles that are left over fill the rows after the last expert's with zeros.
        tail = tl.max(ends, 0)
        begin = tl.where(owned, begin, tail + (tile - num_tiles) * ROWS)
        end = tl.where(owned, end, num_rows)
        rows = begin.to(tl.int64) + tl.arange(0, ROWS)
        present = rows < end
        chosen = rows < tl.where(owned, end, 0)
    total = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    if BY_IDS:
        # One pass for each expert of the tile: one alone where the ids are aligned. 64 bits, for the offset of its weight.
        for matrix in range(first_expert.to(tl.int64), last_expert.to(tl.int64) + 1):
            chosen = owner == matrix
            depth = tl.where(tl.sum(chosen.to(tl.int32), 0) > 0, in_features, 0)
            part = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
            part = multiply_tile(
                part, rows, chosen, features, feature_mask, 0, depth, in_features,
                x_ptr, x_scale_ptr, x_zero_ptr, x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
                w_ptr + matrix * w_matrix, w_scale_ptr + matrix * w_scale_matrix, w_zero_ptr + matrix * w_zero_matrix,
                w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col,
                X_KIND, X_SCALE, X_BLOCK_ROWS, X_BLOCK_COLS, W_KIND, W_SCALE, W_BLOCK_ROWS, W_BLOCK_COLS,
                LATE, DOT, ROWS, FEATURES, DEPTH,
            )  # fmt: skip
            if W_GLOBAL:
                part *= tl.load(w_global_ptr + matrix)
            total = tl.where(chosen[:, None], part, total)
    else:
        matrix = tl.where(owned, expert, 0).to(tl.int64)
        depth = tl.where(owned, in_features, 0)
        total = multiply_tile(
            total, rows, chosen, features, feature_mask, 0, depth, in_features,
            x_ptr, x_scale_ptr, x_zero_ptr, x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
            w_ptr + matrix * w_matrix, w_scale_ptr + matrix * w_scale_matrix, w_zero_ptr + matrix * w_zero_matrix,
            w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col,
            X_KIND, X_SCALE, X_BLOCK_ROWS, X_BLOCK_COLS, W_KIND, W_SCALE, W_BLOCK_ROWS, W_BLOCK_COLS,
            LATE, DOT, ROWS, FEATURES, DEPTH,
        )  # fmt: skip
        if W_GLOBAL:
            total *= tl.load(w_global_ptr + matrix)
        # Tiles of rows that belong to no one, or beyond the expert's, stay 0 even where a weight is NaN.
        total = tl.where(chosen[:, None], total, 0.0)
    if X_GLOBAL:
        total *= tl.load(x_global_ptr)
    out_ptrs = out_ptr + rows[:, None] * out_row + features[None, :] * out_col
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=present[:, None] & feature_mask[None, :])


def bmm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.bmm`."""
    return _batched(x, weight, None, out, out_dtype)


def grouped_mm_masked(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    masked_m: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_masked`."""
    return _batched(x, weight, masked_m, out, out_dtype)


def _batched(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    counts: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    num_matrices, num_rows, in_features = x.shape
    out_features = weight.shape[1]
    if out is None:
        out = torch.empty((num_matrices, num_rows, out_features), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    left, right = prepared(x, weight, operand(x), operand(weight))
    plain = x.dtype if isinstance(x, torch.Tensor) else None
    tiles = choose_tiles(num_rows, left, right, wide=plain is torch.float32, amd=torch.version.hip is not None)
    grid = (triton.cdiv(num_rows, tiles.rows) * triton.cdiv(out_features, tiles.features), num_matrices)
    _batched_kernel[grid](
        *left.tensors, *right.tensors, out if counts is None else counts, out, num_rows, out_features, in_features,
        *left.strides, *right.strides, 0 if counts is None else counts.stride(0), *out.stride(),
        **product_constants(left, right, plain, tiles), MASKED=counts is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def grouped_mm_contiguous(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    offsets: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_contiguous`."""
    num_rows, in_features = x.shape
    num_experts, out_features = weight.shape[:2]
    if out is None:
        out = torch.empty((num_rows, out_features), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if num_experts == 0:
        return out.zero_()
    owners = offsets if expert_ids is None else expert_ids
    assert owners is not None
    left, right = prepared(x, weight, operand(x), operand(weight))
    plain = x.dtype if isinstance(x, torch.Tensor) else None
    rows_each = triton.cdiv(num_rows, num_experts)
    tiles = choose_tiles(rows_each, left, right, wide=plain is torch.float32, amd=torch.version.hip is not None)
    # Each expert may leave its last tile partly empty.
    num_tiles = triton.cdiv(num_rows, tiles.rows) + (num_experts if expert_ids is None else 0)
    x_steps = [*left.strides[1:3], *left.strides[4:6], *left.strides[7:9]]
    _contiguous_kernel[(num_tiles * triton.cdiv(out_features, tiles.features),)](
        *left.tensors, *right.tensors, owners, out, num_rows, out_features, in_features, num_experts,
        *x_steps, *right.strides, owners.stride(0), *out.stride(),
        **product_constants(left, right, plain, tiles), BY_IDS=expert_ids is not None,
        EXPERTS=triton.next_power_of_2(num_experts), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out

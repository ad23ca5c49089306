"""Matrix product in Triton: tiles over rows and output features, one loop over input features."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["mm"]


class _Tiles(NamedTuple):
    rows: int
    features: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit
def _mm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, out_features, in_features,
    x_row, x_col, weight_row, weight_col, bias_step, out_row, out_col,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs that follow each other take GROUP tiles down before the next column: they share weight tiles in the L2 cache.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    group_size = GROUP * tl.cdiv(out_features, FEATURES)
    first_row_tile = program // group_size * GROUP
    rows_in_group = tl.minimum(row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + program % group_size % rows_in_group
    feature_tile = program % group_size // rows_in_group

    # 64-bit offsets: rows times strides pass 2**31 elements for a vocabulary-sized output or a sliced input.
    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = feature_tile.to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    row_mask = rows[:, None] < num_rows
    feature_mask = features[None, :] < out_features
    x_ptrs = x_ptr + rows[:, None] * x_row + depth[None, :] * x_col
    weight_ptrs = weight_ptr + features[None, :] * weight_row + depth[:, None] * weight_col
    # Also a step can pass 2**31 elements, where the last dimension has the large stride.
    x_step = tl.full([1, 1], DEPTH, dtype=tl.int64) * x_col
    weight_step = tl.full([1, 1], DEPTH, dtype=tl.int64) * weight_col
    total = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    for start in range(0, in_features, DEPTH):
        if WHOLE_DEPTH:
            x = tl.load(x_ptrs, mask=row_mask, other=0.0)
            weight = tl.load(weight_ptrs, mask=feature_mask, other=0.0)
        else:
            left = in_features - start
            x = tl.load(x_ptrs, mask=row_mask & (depth[None, :] < left), other=0.0)
            weight = tl.load(weight_ptrs, mask=feature_mask & (depth[:, None] < left), other=0.0)
        # Triton's default for float32 is tf32, which keeps 10 bits of the mantissa.
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += x_step
        weight_ptrs += weight_step
    if HAS_BIAS:
        bias = tl.load(bias_ptr + features * bias_step, mask=features < out_features, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * out_row + features[None, :] * out_col
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask & feature_mask)


def mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`."""
    out_features, in_features = weight.shape
    shape = (*x.shape[:-1], out_features)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = x.reshape(math.prod(shape[:-1]), in_features)
    num_rows = rows.shape[0]
    # Rows of an output that have no common stride are written through a contiguous copy.
    direct = out.dim() == 2 or out.is_contiguous()
    target = out.view(-1, out_features) if out.is_contiguous() else out if direct else out.new_empty((num_rows, out_features))
    tiles = _choose_tiles(num_rows, x.dtype, amd=torch.version.hip is not None)
    grid = (triton.cdiv(num_rows, tiles.rows) * triton.cdiv(out_features, tiles.features),)
    _mm_kernel[grid](
        rows, weight, weight if bias is None else bias, target, num_rows, out_features, in_features,
        *rows.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), *target.stride(),
        HAS_BIAS=bias is not None, ROWS=tiles.rows, FEATURES=tiles.features, DEPTH=tiles.depth,
        WHOLE_DEPTH=in_features % tiles.depth == 0, GROUP=8, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out if direct else out.copy_(target.view(shape))


def _choose_tiles(num_rows: int, dtype: torch.dtype, *, amd: bool) -> _Tiles:
    """Few rows: narrow tiles, so that a weight of 4096 features still gives a tile to each of ~128 processors, with a deep
    loop body to keep enough loads in flight. Many rows: square tiles, as large as registers allow."""
    if dtype is torch.float32:
        # IEEE products use the ordinary units: the accumulator, not the operands, limits the tile.
        tiles = _Tiles(16, 32, 64, 4, 3) if num_rows <= 16 else _Tiles(64, 64, 32, 4, 3)
    elif num_rows <= 16:
        tiles = _Tiles(16, 32, 128, 4, 4)
    elif num_rows <= 64:
        tiles = _Tiles(64, 64, 64, 4, 4)
    else:
        tiles = _Tiles(128, 128, 64, 8, 3)
    # CDNA 2 and 3 have 64 KiB of shared memory a block, into which more stages of the large tiles do not fit.
    return tiles._replace(num_stages=2) if amd else tiles

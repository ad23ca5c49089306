"""Matrix product in Triton for at most 16 rows: the depth is split over programs, so that enough of them read the weight.

Memory is the limit: each weight is read once, and only a matrix of few features would leave processors without work. The parts of
a sum are added in the same order each time, by a second kernel; where there are features enough, one part is left and the first
kernel writes the result.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.gemm.triton.product import Tiles, multiply_tile, prepared, product_constants
from tokenspeed_kernel.ops.quantization.triton.tile import Operand, operand
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm", "num_splits"]

_ROWS = 16
# Programs a processor runs at a time: four tiles with three stages each fit into its shared memory.
_PROGRAMS_EACH = 4
_INTERPRETED_PROCESSORS = 2


@triton.jit
def _few_rows_kernel(
    x_ptr, x_scale_ptr, x_zero_ptr, x_global_ptr, w_ptr, w_scale_ptr, w_zero_ptr, w_global_ptr, bias_ptr, out_ptr,
    num_rows, out_features, in_features, depth_each,
    x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
    w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col, bias_step, out_split, out_row, out_col,
    X_KIND: tl.constexpr, X_SCALE: tl.constexpr, X_BLOCK_ROWS: tl.constexpr, X_BLOCK_COLS: tl.constexpr,
    W_KIND: tl.constexpr, W_SCALE: tl.constexpr, W_BLOCK_ROWS: tl.constexpr, W_BLOCK_COLS: tl.constexpr,
    X_GLOBAL: tl.constexpr, W_GLOBAL: tl.constexpr, LATE: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS).to(tl.int64)
    features = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    split = tl.program_id(1)
    row_mask, feature_mask = rows < num_rows, features < out_features
    first = split * depth_each
    last = tl.minimum(first + depth_each, in_features)
    total = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    total = multiply_tile(
        total, rows, row_mask, features, feature_mask, first, last, in_features,
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
    out_ptrs = out_ptr + split.to(tl.int64) * out_split + rows[:, None] * out_row + features[None, :] * out_col
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & feature_mask[None, :])


@triton.jit
def _add_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, splits, out_features, parts_split, parts_row, bias_step, out_row, out_col,
    HAS_BIAS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    mask = features < out_features
    total = tl.zeros([FEATURES], dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + split * parts_split + row * parts_row + features, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + features * bias_step, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + features * out_col, total.to(out_ptr.dtype.element_ty), mask=mask)


def mm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`; x has at most 16 rows."""
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
    direct = out.dim() == 2 or out.is_contiguous()
    target = out.view(-1, out_features) if out.is_contiguous() else out if direct else out.new_empty((num_rows, out_features))
    left, right = prepared(rows, weight, operand(rows), operand(weight))
    plain = rows.dtype if isinstance(rows, torch.Tensor) else None
    tiles = choose_few_rows_tiles(right, wide=plain is torch.float32, amd=torch.version.hip is not None)
    feature_tiles = triton.cdiv(out_features, tiles.features)
    splits = num_splits(feature_tiles, in_features, tiles.depth, _processors(out.device))
    depth_each = triton.cdiv(triton.cdiv(in_features, tiles.depth), splits) * tiles.depth
    last = splits == 1
    parts = target.unsqueeze(0) if last else torch.empty((splits, num_rows, out_features), dtype=torch.float32, device=out.device)
    with_bias, bias_step = bias is not None and last, 0 if bias is None else bias.stride(0)
    x_steps, w_steps = ([*one.strides[1:3], *one.strides[4:6], *one.strides[7:9]] for one in (left, right))
    _few_rows_kernel[(feature_tiles, splits)](
        *left.tensors, *right.tensors, target if bias is None else bias, parts, num_rows, out_features, in_features, depth_each,
        *x_steps, *w_steps, bias_step, *parts.stride(),
        **product_constants(left, right, plain, tiles), HAS_BIAS=with_bias,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if not last:
        _add_parts_kernel[(num_rows, triton.cdiv(out_features, 512))](
            parts, target if bias is None else bias, target, splits, out_features, *parts.stride()[:2], bias_step, *target.stride(),
            HAS_BIAS=bias is not None, FEATURES=512, num_warps=4,
        )  # fmt: skip
    return out if direct else out.copy_(target.view(shape))


def choose_few_rows_tiles(weight: Operand, *, wide: bool, amd: bool) -> Tiles:
    """Narrow and deep, so that many programs have many loads in flight.

    Args:
        weight: features.
        wide: values are float32.
        amd: fewer stages, for 64 KiB of shared memory.
    """
    # Each element of a GGUF block finds its scales: with more of them to a thread, registers spill.
    tiles = Tiles(_ROWS, 32, 64, 4, 3) if wide or weight.constants[0].startswith("gguf") else Tiles(_ROWS, 32, 128, 4, 4)
    return tiles._replace(num_stages=2) if amd else tiles


def num_splits(feature_tiles: int, in_features: int, depth: int, processors: int) -> int:
    """Return into how many parts the depth is cut: as many as give each processor some programs, but two steps each at least.

    Args:
        feature_tiles: programs without any split.
        in_features: whole depth.
        depth: of a step.
        processors: of the device.
    """
    wanted = processors * _PROGRAMS_EACH // max(feature_tiles, 1)
    return max(1, min(wanted, in_features // (2 * depth), 16))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED_PROCESSORS

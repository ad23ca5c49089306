"""Quantizing in Triton: one program a tile of blocks, or a row where the row has one scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.quantization.quantize import empty_quantized
from tokenspeed_kernel.ops.quantization.triton.codes import encode_values
from tokenspeed_kernel.ops.quantization.triton.tile import rounded_to
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["quantize"]

_KINDS = {
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp4": "e2m1",
    "nvfp4": "e2m1",
    "mxint4": "twos",
    "int4": "int4",
    "uint4": "uint4",
}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


@triton.jit
def _finite(values):
    """The values; 0 for those that are not finite."""
    return tl.where(tl.abs(values) <= 3.4028234663852886e38, values, 0.0)


@triton.jit
def _or_one(scale):
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _largest_kernel(x_ptr, out_ptr, num_rows, num_columns, x_matrix, x_row, x_col, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest finite number of each matrix, as the bits of a float32: in the order of the numbers, if none is negative."""
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    values = tl.load(x_ptr + matrix * x_matrix + rows[:, None] * x_row + columns[None, :] * x_col, mask=mask, other=0.0)
    largest = tl.max(tl.max(tl.abs(_finite(values.to(tl.float32))), 1), 0)
    tl.atomic_max(out_ptr + matrix, largest.to(tl.int32, bitcast=True))


@triton.jit
def _matrix_scale_kernel(bits_ptr, scale_ptr, num_matrices, divisor, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    mask = index < num_matrices
    largest = tl.load(bits_ptr + index, mask=mask, other=0).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + index, _or_one(tl.math.div_rn(largest, largest * 0.0 + divisor)), mask=mask)


@triton.jit
def _block_scales(blocks, scale_ptrs, zero_ptrs, mask, total, KIND: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr):
    """Compute and store the scale of each block, [rows, groups] from [rows, groups, elements]; return (divisor, zero point)."""
    finite = _finite(blocks)
    largest = tl.max(tl.abs(finite), 2)
    known = tl.max((blocks != blocks).to(tl.int32), 2) == 0
    zeros = tl.zeros_like(largest)
    if SCALE == "float":
        scale = _or_one(tl.math.div_rn(largest, zeros + LARGEST))
        tl.store(scale_ptrs, scale.to(scale_ptrs.dtype.element_ty), mask=mask)
    elif SCALE == "e8m0":
        # The exponent of a float32 is its floor(log2); that of a subnormal one is below every scale.
        shift: tl.constexpr = 8 if LARGEST == 448.0 else (15 if LARGEST == 57344.0 else 2)
        stored = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - shift, 0)
        stored = tl.where(largest == 0.0, 127, stored)
        scale = tl.where(stored == 0, 1 << 22, stored << 23).to(tl.float32, bitcast=True)
        if KIND == "e2m1":
            stored = tl.where(known, stored, 255)
            scale = tl.where(known, scale, float("nan"))
        tl.store(scale_ptrs, stored.to(tl.uint8), mask=mask)
    elif SCALE == "e4m3":
        wanted = tl.math.div_rn(tl.math.div_rn(largest, zeros + 6.0), zeros + total)
        wanted = tl.where(largest == 0.0, 1.0, wanted)
        wanted = tl.where(known, wanted, float("nan"))
        codes = encode_values(wanted, zeros, "e4m3")
        tl.store(scale_ptrs, codes.to(tl.uint8), mask=mask)
        value = ((codes & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        scale = tl.where(known, value, float("nan")) * total
    else:
        top = tl.max(tl.maximum(finite, 0.0), 2)
        bottom = tl.max(tl.maximum(-finite, 0.0), 2)
        if KIND == "twos":
            wanted = tl.maximum(tl.math.div_rn(top, zeros + 7.0), tl.math.div_rn(bottom, zeros + 8.0))
        elif KIND == "int4":
            wanted = tl.math.div_rn(largest, zeros + 7.5)
        else:
            wanted = tl.math.div_rn(top + bottom, zeros + 15.0)
        kept = _or_one(rounded_to(wanted, scale_ptrs.dtype.element_ty))
        kept = tl.where(known, kept, float("nan"))
        tl.store(scale_ptrs, kept.to(scale_ptrs.dtype.element_ty), mask=mask)
        # What is kept divides, as rounded as it is.
        scale = kept
        if KIND == "uint4":
            ratio = tl.math.div_rn(bottom, scale)
            ratio = tl.where(ratio == ratio, tl.minimum(ratio, 64.0), 0.0)
            zeros = tl.minimum((ratio + 12582912.0) - 12582912.0, 15.0)
            tl.store(zero_ptrs, zeros.to(tl.uint8), mask=mask)
    return scale, zeros


@triton.jit
def _store_codes(data_ptrs, codes, mask, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes [ROWS, COLUMNS] at the pointers of their bytes; two of four bits share one, the first in the lower half."""
    if KIND == "e4m3" or KIND == "e5m2":
        tl.store(data_ptrs, codes.to(tl.uint8), mask=mask)
    else:
        low, high = tl.split(codes.reshape(ROWS, COLUMNS // 2, 2))
        tl.store(data_ptrs, (low | (high << 4)).to(tl.uint8), mask=mask)


@triton.jit
def _blocks_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, global_ptr, num_rows, num_columns,
    x_matrix, x_row, x_col, data_matrix, data_row, scale_matrix, scale_row, scale_col, zero_matrix, zero_row, zero_col,
    KIND: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    GIVEN: tl.constexpr, GLOBAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks that lie within a tile. GIVEN: the scales are there (BLOCK_COLS 0: one for the row, BLOCK_ROWS 0: for the matrix)."""
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    columns = start + tl.arange(0, COLUMNS)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (columns < num_columns)[None, :]
    x_ptrs = x_ptr + matrix * x_matrix + rows[:, None] * x_row + columns.to(tl.int64)[None, :] * x_col
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    GROUP: tl.constexpr = BLOCK_COLS if BLOCK_COLS > 0 else COLUMNS
    GROUPS: tl.constexpr = COLUMNS // GROUP
    groups = start // GROUP + tl.arange(0, GROUPS)
    group_mask = row_mask[:, None] & (groups * GROUP < num_columns)[None, :]
    scale_ptr += matrix * scale_matrix
    zero_ptr += matrix * zero_matrix
    total = 1.0
    if GLOBAL:
        total = tl.load(global_ptr + matrix)
    places = groups.to(tl.int64)[None, :]
    if GIVEN:
        scale_rows = rows // BLOCK_ROWS if BLOCK_ROWS > 0 else rows * 0
        places = places if BLOCK_COLS > 0 else places * 0
        pointers = scale_ptr + scale_rows[:, None] * scale_row + places * scale_col
        scale = tl.load(pointers, mask=group_mask, other=1.0).to(tl.float32)
        zeros = tl.zeros_like(scale)
        blocks = x.reshape(ROWS, GROUPS, GROUP)
    elif BLOCK_ROWS > 1:
        # One block a program: all of its rows go into one sum.
        blocks = x.reshape(1, 1, ROWS * COLUMNS)
        pointers = scale_ptr + tl.program_id(0).to(tl.int64) * scale_row + tl.program_id(1).to(tl.int64) * scale_col
        pointers += tl.zeros([1, 1], dtype=tl.int64)
        scale, zeros = _block_scales(blocks, pointers, pointers, tl.full([1, 1], 1, tl.int1), total, KIND, SCALE, LARGEST)
    else:
        blocks = x.reshape(ROWS, GROUPS, GROUP)
        pointers = scale_ptr + rows[:, None] * scale_row + places * scale_col
        zero_ptrs = zero_ptr + rows[:, None] * zero_row + places * zero_col
        scale, zeros = _block_scales(blocks, pointers, zero_ptrs, group_mask, total, KIND, SCALE, LARGEST)
    quotient = tl.math.div_rn(blocks, tl.zeros_like(blocks) + scale[:, :, None])
    if GLOBAL:
        quotient = tl.where(scale[:, :, None] == 0.0, 0.0, quotient)
    codes = encode_values(quotient, zeros[:, :, None], KIND).reshape(ROWS, COLUMNS)
    data_ptrs = data_ptr + matrix * data_matrix + rows[:, None] * data_row
    if KIND == "e4m3" or KIND == "e5m2":
        _store_codes(data_ptrs + columns[None, :], codes, mask, KIND, ROWS, COLUMNS)
    else:
        pairs = start // 2 + tl.arange(0, COLUMNS // 2)
        pair_mask = row_mask[:, None] & (pairs * 2 < num_columns)[None, :]
        _store_codes(data_ptrs + pairs[None, :], codes, pair_mask, KIND, ROWS, COLUMNS)


@triton.jit
def _row_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, num_columns,
    x_matrix, x_row, x_col, data_matrix, data_row, scale_matrix, scale_row, zero_matrix, zero_row,
    KIND: tl.constexpr, LARGEST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row with one scale, in pieces: first the extremes, then the codes. fp8, int4 and uint4."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x_ptr += matrix * x_matrix + row * x_row
    data_ptr += matrix * data_matrix + row * data_row
    scale_ptr += matrix * scale_matrix + row * scale_row
    top = tl.zeros([COLUMNS], dtype=tl.float32)
    bottom = tl.zeros([COLUMNS], dtype=tl.float32)
    unknown = tl.zeros([COLUMNS], dtype=tl.int32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + columns.to(tl.int64) * x_col, mask=columns < num_columns, other=0.0).to(tl.float32)
        unknown = tl.maximum(unknown, (x != x).to(tl.int32))
        x = _finite(x)
        top = tl.maximum(top, x)
        bottom = tl.maximum(bottom, -x)
    highest, lowest = tl.max(top, 0), tl.max(bottom, 0)
    largest = tl.maximum(highest, lowest)
    zero = largest * 0.0
    if KIND == "uint4":
        wanted = tl.math.div_rn(highest + lowest, zero + 15.0)
    else:
        wanted = tl.math.div_rn(largest, zero + LARGEST)
    scale = _or_one(rounded_to(wanted, scale_ptr.dtype.element_ty))
    if KIND == "int4" or KIND == "uint4":
        scale = tl.where(tl.max(unknown, 0) > 0, float("nan"), scale)
    if KIND == "uint4":
        ratio = tl.math.div_rn(lowest, scale)
        ratio = tl.where(ratio == ratio, tl.minimum(ratio, 64.0), 0.0)
        zero = tl.minimum((ratio + 12582912.0) - 12582912.0, 15.0)
        tl.store(zero_ptr + matrix * zero_matrix + row * zero_row, zero.to(tl.uint8))
    tl.store(scale_ptr, scale.to(scale_ptr.dtype.element_ty))
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + columns.to(tl.int64) * x_col, mask=columns < num_columns, other=0.0).to(tl.float32)
        codes = encode_values(tl.math.div_rn(x, tl.zeros_like(x) + scale), tl.zeros_like(x) + zero, KIND)
        if KIND == "e4m3" or KIND == "e5m2":
            tl.store(data_ptr + columns, codes.to(tl.uint8), mask=columns < num_columns)
        else:
            pairs = start // 2 + tl.arange(0, COLUMNS // 2)
            low, high = tl.split(codes.reshape(COLUMNS // 2, 2))
            tl.store(data_ptr + pairs, (low | (high << 4)).to(tl.uint8), mask=pairs * 2 < num_columns)


def quantize(
    x: torch.Tensor,
    format: Format,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """See `tokenspeed_kernel.ops.quantization.quantize`."""
    shape = tuple(x.shape)
    if out is None:
        kept = torch.float32 if format.logical.startswith("fp8") else x.dtype
        out = empty_quantized(format, shape, x.device, kept)
        if scale is not None:
            out = QuantizedTensor(out.data, format, shape, scale)
        if global_scale is not None:
            out = QuantizedTensor(out.data, format, shape, out.scale, global_scale)
    else:
        for mine, given in ((out.scale, scale), (out.global_scale, global_scale)):
            if given is not None and mine is not None:
                mine.copy_(given)
    _fill(x, out, scale is not None, global_scale is not None)
    return out


def _fill(x: torch.Tensor, out: QuantizedTensor, scale_given: bool, global_given: bool) -> None:
    if out.ndim > 3:
        for index in range(out.shape[0]):
            _fill(x[index], out[index], scale_given, global_given)
        return
    fmt, kind = out.format, _KINDS[out.format.logical]
    matrices, num_rows, num_columns = (1, *out.shape) if out.ndim == 2 else out.shape
    x_steps = (0, *x.stride()) if x.dim() == 2 else x.stride()
    if fmt.scale == "tensor" and not scale_given:
        _matrix_scales(x, x_steps, (matrices, num_rows, num_columns), out.scale, _LARGEST[kind])
        scale_given = True
    if fmt.logical == "nvfp4" and not global_given:
        _matrix_scales(x, x_steps, (matrices, num_rows, num_columns), out.global_scale, 6.0 * 448.0)
    if matrices * num_rows == 0:
        return
    data, scale, zero = out.data.view(torch.uint8), out.scale, out.zero_point
    assert scale is not None
    data_steps = _steps(data, out.ndim)[:2]
    scale_steps, zero_steps = _steps(scale, out.ndim), _steps(zero, out.ndim)
    if fmt.scale in ("channel", "token") and not scale_given:
        columns = min(max(triton.next_power_of_2(num_columns), 16), 1024)
        largest = 7.5 if kind == "int4" else _LARGEST.get(kind, 0.0)
        _row_kernel[(num_rows, matrices)](
            x, data, scale, scale if zero is None else zero, num_columns,
            *x_steps, *data_steps, *scale_steps[:2], *zero_steps[:2],
            KIND=kind, LARGEST=largest, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        return
    if num_columns == 0:
        return
    how = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(scale.dtype, "float" if kind in _LARGEST else "whole")
    square = fmt.scale == "block_128x128"
    rows, columns = (128, 128) if square and not scale_given else (4, 256)
    total = out.global_scale.contiguous() if out.global_scale is not None else scale
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns), matrices)
    _blocks_kernel[grid](
        x, data, scale.view(torch.uint8) if how == "e4m3" else scale, scale if zero is None else zero, total,
        num_rows, num_columns, *x_steps, *data_steps, *scale_steps, *zero_steps,
        KIND=kind, SCALE=how, LARGEST=_LARGEST.get(kind, 0.0), BLOCK_ROWS=fmt.block[0], BLOCK_COLS=fmt.block[1],
        GIVEN=scale_given, GLOBAL=out.global_scale is not None, ROWS=rows, COLUMNS=columns,
        num_warps=8 if square else 4,
    )  # fmt: skip


def _matrix_scales(
    x: torch.Tensor, x_steps: tuple[int, ...], sizes: tuple[int, int, int], scale: torch.Tensor | None, divisor: float
) -> None:
    """One scale for each matrix: the largest number first, of all programs, then the quotient."""
    assert scale is not None
    matrices, num_rows, num_columns = sizes
    bits = torch.zeros(max(matrices, 1), dtype=torch.int32, device=x.device)
    if matrices * num_rows * num_columns:
        rows, columns = 8, 256
        grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns), matrices)
        _largest_kernel[grid](x, bits, num_rows, num_columns, *x_steps, ROWS=rows, COLUMNS=columns, num_warps=4)
    if matrices == 0:
        return
    target = scale if scale.is_contiguous() else torch.empty_like(scale, memory_format=torch.contiguous_format)
    if target.dtype is not torch.float32:
        target = torch.empty(scale.shape, dtype=torch.float32, device=x.device)
    _matrix_scale_kernel[(1,)](bits, target, matrices, divisor, BLOCK=triton.next_power_of_2(matrices))
    if target is not scale:
        scale.copy_(target)


def _steps(tensor: torch.Tensor | None, ndim: int) -> tuple[int, int, int]:
    """Strides as (matrix, row, column)."""
    if tensor is None:
        return 0, 0, 0
    steps = tensor.stride() if tensor.dim() == ndim else (*tensor.stride(), 0, 0)
    matrix, row, column = (0,) * (3 - len(steps)) + tuple(steps)
    return matrix, row, column

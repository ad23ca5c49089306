"""A tile of a matrix in any scaled format, decoded in registers: the part that all Triton kernels for such operands share.

Codes are decoded by integer operations and one multiplication by a power of two, so that the same code serves architectures with
and without the format in hardware, and Triton's interpreter. Products that the format defines are exact in float32 but for the last
rounding; kernels that use these tiles agree bit for bit with the reference where they only decode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["Operand", "load_tile", "operand", "rounded_to"]

_KINDS = {
    "fp8_e4m3": "e4m3",
    "mxfp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
    "mxfp8_e5m2": "e5m2",
    "nvfp4": "e2m1",
    "mxfp4": "e2m1",
    "mxint4": "twos",
    "int4": "int4",
    "uint4": "uint4",
}


class Operand(NamedTuple):
    """What a kernel takes for one operand.

    Attributes:
        tensors: values, scales, zero points, global scales; what is absent is the values once more, and is not read.
        strides: of the values, the scales and the zero points: (matrix, row, column) each.
        constants: KIND, SCALE, BLOCK_ROWS, BLOCK_COLS, GLOBAL; in this order `load_tile` takes the first four.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    strides: tuple[int, ...]
    constants: tuple[str, str, int, int, bool]


def operand(tensor: torch.Tensor | QuantizedTensor) -> Operand:
    """Take an operand apart for a launch.

    Args:
        tensor: a matrix or a stack of them, plain or quantized.
    """
    if isinstance(tensor, torch.Tensor):
        strides = (0, *tensor.stride()) if tensor.dim() == 2 else tensor.stride()
        return Operand((tensor, tensor, tensor, tensor), (*strides, *(0,) * 6), ("plain", "none", 0, 0, False))
    fmt, data, scale, zero = tensor.format, tensor.data, tensor.scale, tensor.zero_point
    rows, columns = fmt.block
    kind = _KINDS.get(fmt.logical, fmt.logical)
    how = "none" if scale is None else "e8m0" if scale.dtype is torch.uint8 else "float"
    if how == "float" and scale is not None and scale.dtype is torch.float8_e4m3fn:
        how, scale = "e4m3", scale.view(torch.uint8)
    bytes_ = data.view(torch.uint8)
    strides = (*_strides(bytes_, 3, tensor.ndim), *_strides(scale, 3, tensor.ndim), *_strides(zero, 3, tensor.ndim))
    total = tensor.global_scale
    scale_, zero_, total_ = (bytes_ if one is None else one for one in (scale, zero, total))
    return Operand((bytes_, scale_, zero_, total_), strides, (kind, how, rows, columns, total is not None))


def _strides(tensor: torch.Tensor | None, wanted: int, ndim: int) -> tuple[int, ...]:
    if tensor is None:
        return (0,) * wanted
    # One scale a matrix: [] or [matrices].
    steps = tensor.stride() if tensor.dim() == ndim else (*tensor.stride(), 0, 0)
    return (0,) * (wanted - len(steps)) + tuple(steps)


@triton.jit
def rounded_to(values, DTYPE: tl.constexpr):
    """float32 numbers rounded to what DTYPE holds. In integers for bf16: the interpreter would cut the bits off."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300  # Triton compares its types from the left
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = tl.where(values != values, values, bits.to(tl.float32, bitcast=True))
    else:
        values = values.to(DTYPE).to(tl.float32)
    return values


@triton.jit
def _e4m3(bits):
    """Value of e4m3 codes. The exponent's bias differs by 120 from that of float32; that holds for subnormal numbers as well."""
    bits = bits.to(tl.int32)
    value = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((bits & 127) == 127, float("nan"), value)


@triton.jit
def _e2m1(codes):
    """Value of e2m1 codes, whose exponent's bias differs by 126."""
    codes = codes.to(tl.int32)
    return (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _e8m0(codes):
    """2 ** (code - 127); 0 is a subnormal float32, 255 NaN."""
    codes = codes.to(tl.int32)
    value = tl.where(codes == 0, 1 << 22, codes << 23).to(tl.float32, bitcast=True)
    return tl.where(codes == 255, float("nan"), value)


@triton.jit
def _half(pointers, mask):
    """A float16 of two bytes at any address."""
    low = tl.load(pointers, mask=mask, other=0).to(tl.int16)
    high = tl.load(pointers + 1, mask=mask, other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _gguf_tile(row_ptrs, columns, mask, KIND: tl.constexpr):
    """Elements at `columns` of rows that start at `row_ptrs`; each finds its block, its code and its scales."""
    if KIND == "gguf_q4_0":
        block = row_ptrs + (columns // 32 * 18)[None, :]
        place = columns % 32
        packed = tl.load(block + 2 + (place % 16)[None, :], mask=mask, other=0).to(tl.int32)
        values = _half(block, mask) * (((packed >> (place // 16 * 4)[None, :]) & 15) - 8).to(tl.float32)
    elif KIND == "gguf_q4_1":
        block = row_ptrs + (columns // 32 * 20)[None, :]
        place = columns % 32
        packed = tl.load(block + 4 + (place % 16)[None, :], mask=mask, other=0).to(tl.int32)
        codes = ((packed >> (place // 16 * 4)[None, :]) & 15).to(tl.float32)
        values = _half(block, mask) * codes + _half(block + 2, mask)
    elif KIND == "gguf_q8_0":
        block = row_ptrs + (columns // 32 * 34)[None, :]
        codes = tl.load(block + 2 + (columns % 32)[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        values = _half(block, mask) * codes.to(tl.float32)
    elif KIND == "gguf_q4_k":
        block = row_ptrs + (columns // 256 * 144)[None, :]
        place = columns % 256
        part = (place // 32)[None, :]
        # The last four parts have their lower bits in bytes 12 to 15, their upper two in those of the first four.
        late = part >= 4
        first = tl.load(block + 4 + part % 4, mask=mask, other=0).to(tl.int32)
        second = tl.load(block + 8 + part % 4, mask=mask, other=0).to(tl.int32)
        mixed = tl.load(block + 12 + part % 4, mask=mask & late, other=0).to(tl.int32)
        scale = tl.where(late, (mixed & 15) | ((first >> 6) << 4), first & 63).to(tl.float32)
        minimum = tl.where(late, (mixed >> 4) | ((second >> 6) << 4), second & 63).to(tl.float32)
        packed = tl.load(block + 16 + (place // 64 * 32 + place % 32)[None, :], mask=mask, other=0).to(tl.int32)
        codes = ((packed >> (place // 32 % 2 * 4)[None, :]) & 15).to(tl.float32)
        values = _half(block, mask) * scale * codes - _half(block + 2, mask) * minimum
    else:
        tl.static_assert(KIND == "gguf_q6_k")
        block = row_ptrs + (columns // 256 * 210)[None, :]
        place = columns % 256
        half, quarter, inner = place // 128, place % 128 // 32, place % 32
        low = tl.load(block + (half * 64 + quarter % 2 * 32 + inner)[None, :], mask=mask, other=0).to(tl.int32)
        high = tl.load(block + 128 + (half * 32 + inner)[None, :], mask=mask, other=0).to(tl.int32)
        low = (low >> (quarter // 2 * 4)[None, :]) & 15
        codes = low | (((high >> (quarter * 2)[None, :]) & 3) << 4)
        scale = tl.load(block + 192 + (place // 16)[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        values = _half(block + 208, mask) * scale.to(tl.float32) * (codes - 32).to(tl.float32)
    return values


@triton.jit
def _scale_values(pointers, mask, SCALE: tl.constexpr):
    if SCALE == "float":
        values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    elif SCALE == "e8m0":
        values = _e8m0(tl.load(pointers, mask=mask, other=0))
    else:
        values = _e4m3(tl.load(pointers, mask=mask, other=0))
    return values


@triton.jit
def load_tile(
    data_ptr, scale_ptr, zero_ptr, rows, row_mask, start, num_columns,
    data_row, data_col, scale_row, scale_col, zero_row, zero_col,
    KIND: tl.constexpr, SCALE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    NUM_ROWS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr = True,
):  # fmt: skip
    """Values of `rows` (int64) at columns start .. start + DEPTH - 1, with their scales but without a global one.

    Outside of the matrix the values are 0. A plain operand keeps its dtype; all others come as float32. `start` is a multiple of
    DEPTH, and DEPTH is a multiple of the columns of a block, or a part of one.
    SCALED: False leaves the scales out, for a kernel that applies them to the product.
    """
    columns = start + tl.arange(0, DEPTH)
    mask = row_mask[:, None] & (columns < num_columns)[None, :]
    row_ptrs = data_ptr + rows[:, None] * data_row
    if KIND == "plain":
        # A column's stride is any number here, so that 32 bits may not hold the offset.
        values = tl.load(row_ptrs + columns.to(tl.int64)[None, :] * data_col, mask=mask, other=0.0)
    elif KIND == "e4m3":
        values = _e4m3(tl.load(row_ptrs + columns[None, :], mask=mask, other=0))
    elif KIND == "e5m2":
        # e5m2 is the upper half of a float16.
        bits = tl.load(row_ptrs + columns[None, :], mask=mask, other=0).to(tl.int16) << 8
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "e2m1" or KIND == "twos" or KIND == "int4" or KIND == "uint4":
        pairs = start // 2 + tl.arange(0, DEPTH // 2)
        pair_mask = row_mask[:, None] & (pairs * 2 < num_columns)[None, :]
        packed = tl.load(row_ptrs + pairs[None, :], mask=pair_mask, other=0)
        codes = tl.interleave(packed & 15, packed >> 4)
        if KIND == "e2m1":
            values = _e2m1(codes)
        elif KIND == "twos":
            values = ((codes.to(tl.int32) ^ 8) - 8).to(tl.float32)
        elif KIND == "int4":
            values = (codes.to(tl.int32) - 8).to(tl.float32)
        else:
            values = codes.to(tl.float32)
    else:
        values = _gguf_tile(row_ptrs, columns, mask, KIND)
    if SCALE != "none" and SCALED:
        # The scales of the tile: one column of them where a block is at least as wide as the tile.
        GROUP: tl.constexpr = BLOCK_COLS if BLOCK_COLS > 0 and BLOCK_COLS < DEPTH else DEPTH
        GROUPS: tl.constexpr = DEPTH // GROUP
        scale_rows = rows
        if BLOCK_ROWS == 0:
            scale_rows = rows * 0
        elif BLOCK_ROWS > 1:
            scale_rows = rows // BLOCK_ROWS
        groups = tl.arange(0, GROUPS)
        first = groups * GROUP + start
        group_mask = row_mask[:, None] & (first < num_columns)[None, :]
        if BLOCK_COLS > 0:
            groups = first // BLOCK_COLS
        else:
            groups = groups * 0
        groups = groups.to(tl.int64)[None, :]
        if KIND == "uint4":
            zeros = tl.load(zero_ptr + scale_rows[:, None] * zero_row + groups * zero_col, mask=group_mask, other=0)
            values = values.reshape(NUM_ROWS, GROUPS, GROUP) - zeros.to(tl.float32)[:, :, None]
            values = values.reshape(NUM_ROWS, DEPTH)
        scales = _scale_values(scale_ptr + scale_rows[:, None] * scale_row + groups * scale_col, group_mask, SCALE)
        if GROUPS == 1:
            values = values * scales
        else:
            values = (values.reshape(NUM_ROWS, GROUPS, GROUP) * scales[:, :, None]).reshape(NUM_ROWS, DEPTH)
        # A scale that is NaN or infinite beyond the edge of the matrix would make NaN out of 0.
        values = tl.where(mask, values, 0.0)
    return values

"""Tiles of expert weights in any format: how the host describes a stack of matrices, and how a program reads a tile of it.

Codes of 4 and 8 bits become float16 bit patterns by shifts: an exponent that is too small by a known amount, which one
multiplication repairs, subnormals included. So no device needs the formats in hardware; where it has fp8, its
conversion is used.

A scale that holds for a whole step of the depth is applied to the float32 sum, which rounds nothing. Finer ones are applied to the
values before the product; with codes of 4 bits and powers of two that is exact as well.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["Stack", "describe", "from_e4m3", "has_fp8", "load_tile", "row_scales"]


class Stack(NamedTuple):
    """A stack of matrices as kernels take it. The parts that a format does not have are stand-ins that no program reads.

    Attributes:
        pointers: values, scales, zero points, scales of whole matrices.
        strides: of the values by expert, row and (stored) column; of the scales and of the zero points by expert, row and column
            of blocks; of the whole matrices' scales by expert.
        constants: names and values of the compile-time constants that describe the format.
    """

    pointers: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    constants: dict[str, Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Pointers and strides, in the order in which kernels take them."""
        return (*self.pointers, *self.strides)


_KINDS = {"nvfp4": "e2m1", "mxfp4": "e2m1", "mxint4": "twos_complement", "int4": "offset", "uint4": "offset"}
_SCALES = {"nvfp4": "e4m3", "mxfp4": "e8m0", "mxfp8_e4m3": "e8m0", "mxfp8_e5m2": "e8m0"}


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether Triton converts fp8 on the device: NVIDIA's e4m3 from compute capability 8.9 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def describe(stack: torch.Tensor | QuantizedTensor) -> Stack:
    """Return what kernels are told about [num_experts, rows, columns] matrices."""
    if isinstance(stack, torch.Tensor):
        constants = {"KIND": "plain", "SCALES": "none", "SCALE_ROWS": 0, "SCALE_COLS": 0, "ZEROS": False, "TOTAL": False}
        return Stack((stack, stack, stack, stack), (*stack.stride(), 0, 0, 0, 0, 0, 0, 0), constants)
    data, fmt, scale, zero, total = stack.data, stack.format, stack.scale, stack.zero_point, stack.global_scale
    assert scale is not None
    logical = fmt.logical.removeprefix("mx") if fmt.logical.startswith("mxfp8") else fmt.logical
    kind = _KINDS.get(fmt.logical, logical.removeprefix("fp8_"))
    if kind in ("e4m3", "e5m2"):
        if has_fp8(data.device):
            kind = "fp8"
        else:
            data = data.view(torch.uint8)
    if scale.dtype is torch.float8_e4m3fn:
        scale = scale.view(torch.uint8)
    rows, columns = fmt.block if fmt.scale != "tensor" else (0, 0)
    scale_strides = (scale.stride(0), 0, 0) if scale.dim() == 1 else scale.stride()
    constants = {
        "KIND": kind,
        "SCALES": _SCALES.get(fmt.logical, "float"),
        "SCALE_ROWS": rows,
        "SCALE_COLS": columns,
        "ZEROS": zero is not None,
        "TOTAL": total is not None,
    }
    others = (data if zero is None else zero, data if total is None else total)
    strides = (
        *data.stride(),
        *scale_strides,
        *((0, 0, 0) if zero is None else zero.stride()),
        0 if total is None else total.stride(0),
    )
    return Stack((data, scale, *others), strides, constants)


@triton.jit
def from_e4m3(code):
    """Values of fp8 codes, in float32."""
    magnitude = ((code & 0x7F).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    magnitude = tl.where((code & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where(code > 127, -magnitude, magnitude)


@triton.jit
def _from_e5m2(code):
    magnitude = ((code & 0x7F).to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(code > 127, -magnitude, magnitude)


@triton.jit
def _from_e2m1(code):
    magnitude = ((code & 7).to(tl.int16) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def _scale_values(stored, SCALES: tl.constexpr):
    if SCALES == "e8m0":
        # The exponent of a float32. 0 stands for 2**-127, which is subnormal, and 255 for NaN.
        bits = tl.where(stored == 0, 0x00400000, stored.to(tl.int32) << 23)
        values = tl.where(stored == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    elif SCALES == "e4m3":
        values = from_e4m3(stored)
    else:
        values = stored.to(tl.float32)
    return values


@triton.jit
def _spread(per_block, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, DEPTH / COLS] to [ROWS, DEPTH]: each number COLS times."""
    wide = tl.broadcast_to(per_block[:, :, None], (ROWS, DEPTH // COLS, COLS))
    return tl.reshape(wide, (ROWS, DEPTH))


@triton.jit
def load_tile(
    data_ptr, scale_ptr, zero_ptr, rows, row_mask, start, columns,
    data_row, data_col, scale_row, scale_col, zero_row, zero_col,
    KIND: tl.constexpr, SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values [ROWS, DEPTH] of columns start to start + DEPTH, in DTYPE; 0 outside the matrix. Pointers are the expert's own.

    Scales of blocks shorter than DEPTH are applied; longer ones are `row_scales`.
    """
    if KIND == "plain" or KIND == "fp8" or KIND == "e4m3" or KIND == "e5m2":
        depth = start + tl.arange(0, DEPTH).to(tl.int64)
        mask = row_mask[:, None] if EVEN else row_mask[:, None] & (depth < columns)[None, :]
        stored = tl.load(data_ptr + rows[:, None] * data_row + depth[None, :] * data_col, mask=mask, other=0.0)
        if KIND == "e4m3":
            tile = from_e4m3(stored)
        elif KIND == "e5m2":
            tile = _from_e5m2(stored)
        else:
            tile = stored
    else:
        packed = start // 2 + tl.arange(0, DEPTH // 2).to(tl.int64)
        mask = row_mask[:, None] if EVEN else row_mask[:, None] & (packed < columns // 2)[None, :]
        stored = tl.load(data_ptr + rows[:, None] * data_row + packed[None, :], mask=mask, other=0)
        # The lower half of a byte is the even column.
        codes = tl.reshape(tl.join(stored & 15, stored >> 4), (ROWS, DEPTH))
        if KIND == "e2m1":
            tile = _from_e2m1(codes)
        elif KIND == "twos_complement":
            tile = (codes.to(tl.int32) - tl.where(codes > 7, 16, 0)).to(tl.float32)
        elif ZEROS:
            tile = codes.to(tl.float32)
        else:
            tile = (codes.to(tl.int32) - 8).to(tl.float32)
        if not EVEN:  # a code of 0 need not stand for 0
            tile = tl.where((start + tl.arange(0, DEPTH) < columns)[None, :], tile, 0.0)
    if ZEROS:
        if SCALE_COLS > 0 and SCALE_COLS < DEPTH:
            blocks = start // SCALE_COLS + tl.arange(0, DEPTH // SCALE_COLS).to(tl.int64)
            mask = row_mask[:, None] & (blocks < tl.cdiv(columns, SCALE_COLS))[None, :]
            zeros = tl.load(zero_ptr + rows[:, None] * zero_row + blocks[None, :] * zero_col, mask=mask, other=0)
            tile = tile - _spread(zeros.to(tl.float32), ROWS, DEPTH, SCALE_COLS)
        else:
            block = start // SCALE_COLS if SCALE_COLS > 0 else 0
            zeros = tl.load(zero_ptr + rows * zero_row + block * zero_col, mask=row_mask, other=0)
            tile = tile - zeros.to(tl.float32)[:, None]
        if not EVEN:
            tile = tl.where((start + tl.arange(0, DEPTH) < columns)[None, :], tile, 0.0)
    if SCALE_COLS > 0 and SCALE_COLS < DEPTH:
        blocks = start // SCALE_COLS + tl.arange(0, DEPTH // SCALE_COLS).to(tl.int64)
        mask = row_mask[:, None] & (blocks < tl.cdiv(columns, SCALE_COLS))[None, :]
        stored = tl.load(scale_ptr + rows[:, None] * scale_row + blocks[None, :] * scale_col, mask=mask, other=0)
        tile = tile.to(tl.float32) * _spread(_scale_values(stored, SCALES), ROWS, DEPTH, SCALE_COLS)
    return tile.to(DTYPE)


@triton.jit
def row_scales(
    scale_ptr, rows, row_mask, start, scale_row, scale_col,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
):  # fmt: skip
    """The scale of each row in the block that column `start` lies in, float32."""
    block = start // SCALE_COLS if SCALE_COLS > 0 else 0
    if SCALE_ROWS > 0:
        places = (rows // SCALE_ROWS) * scale_row
    else:
        places = rows * 0
    stored = tl.load(scale_ptr + places + block * scale_col, mask=row_mask, other=0)
    return _scale_values(stored, SCALES)

"""One tile of a product of two matrices in any formats: what all kernels for quantized operands and for stacks share.

Scales that hold for a whole step of the depth (fp8 and int4 with one for a tensor, a row, or 128 columns) multiply the product of
the step in float32; finer ones multiply the values before they enter the matrix unit. e2m1 and fp8 values times a power of two, or
e2m1 values times an fp8 scale, are exact in bf16; only scales of other kinds round a value there.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.quantization.triton.tile import Operand, load_tile
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["Tiles", "choose_tiles", "multiply_tile", "prepared", "product_constants"]

# Formats whose codes are exact in half precision, so that their scales can wait.
_EXACT_CODES = ("e4m3", "e5m2", "int4", "plain", "fp8")


class Tiles(NamedTuple):
    """Sizes of a tile, and how it is run."""

    rows: int
    features: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit
def _row_scales(
    scale_ptr, rows, row_mask, start, scale_row, scale_col,
    SCALE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The one scale of each row that holds from column `start` on."""
    scale_rows = rows
    if BLOCK_ROWS == 0:
        scale_rows = rows * 0
    elif BLOCK_ROWS > 1:
        scale_rows = rows // BLOCK_ROWS
    group = tl.zeros_like(rows)
    if BLOCK_COLS > 0:
        group += start // BLOCK_COLS
    return tl.load(scale_ptr + scale_rows * scale_row + group * scale_col, mask=row_mask, other=0.0).to(tl.float32)


@triton.jit
def multiply_tile(
    total, rows, row_mask, features, feature_mask, first, last, num_columns,
    x_ptr, x_scale_ptr, x_zero_ptr, x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
    w_ptr, w_scale_ptr, w_zero_ptr, w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col,
    X_KIND: tl.constexpr, X_SCALE: tl.constexpr, X_BLOCK_ROWS: tl.constexpr, X_BLOCK_COLS: tl.constexpr,
    W_KIND: tl.constexpr, W_SCALE: tl.constexpr, W_BLOCK_ROWS: tl.constexpr, W_BLOCK_COLS: tl.constexpr,
    LATE: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add x[rows, first:last] @ weight[features, first:last].T to `total` (float32), without global scales.

    LATE: scales multiply the product of each step. DOT: dtype in which the values enter the matrix unit.
    """
    for start in range(first, last, DEPTH):
        x = load_tile(
            x_ptr, x_scale_ptr, x_zero_ptr, rows, row_mask, start, num_columns,
            x_row, x_col, x_scale_row, x_scale_col, x_zero_row, x_zero_col,
            X_KIND, X_SCALE, X_BLOCK_ROWS, X_BLOCK_COLS, ROWS, DEPTH, not LATE,
        )  # fmt: skip
        weight = load_tile(
            w_ptr, w_scale_ptr, w_zero_ptr, features, feature_mask, start, num_columns,
            w_row, w_col, w_scale_row, w_scale_col, w_zero_row, w_zero_col,
            W_KIND, W_SCALE, W_BLOCK_ROWS, W_BLOCK_COLS, FEATURES, DEPTH, not LATE,
        )  # fmt: skip
        if LATE:
            # A sum of its own for each step: the matrix unit of some devices keeps fewer bits of a long fp8 sum than float32 has.
            part = tl.dot(x.to(DOT), tl.trans(weight.to(DOT)), input_precision="ieee")
            if W_SCALE != "none":
                part *= _row_scales(
                    w_scale_ptr, features, feature_mask, start, w_scale_row, w_scale_col, W_SCALE, W_BLOCK_ROWS, W_BLOCK_COLS
                )[None, :]
            if X_SCALE != "none":
                part *= _row_scales(
                    x_scale_ptr, rows, row_mask, start, x_scale_row, x_scale_col, X_SCALE, X_BLOCK_ROWS, X_BLOCK_COLS
                )[:, None]
            total += part
        else:
            # Triton's default for float32 is tf32, which keeps 10 bits of the mantissa.
            total = tl.dot(x.to(DOT), tl.trans(weight.to(DOT)), total, input_precision="ieee")
    return total


def product_constants(x: Operand, weight: Operand, plain: torch.dtype | None, tiles: Tiles) -> dict[str, object]:
    """Return the compile-time arguments that two operands need.

    Args:
        x: rows.
        weight: features.
        plain: dtype of x where it is not quantized.
        tiles: sizes of the tile.
    """
    x_kind, x_scale, x_rows, x_cols, x_global = x.constants
    w_kind, w_scale, w_rows, w_cols, w_global = weight.constants
    late = (x_scale, w_scale) != ("none", "none") and all(
        kind in _EXACT_CODES and how in ("none", "float") and (columns == 0 or columns >= tiles.depth)
        for kind, how, columns in ((x_kind, x_scale, x_cols), (w_kind, w_scale, w_cols))
    )
    dot = {torch.float32: tl.float32, torch.float16: tl.float16}.get(plain, tl.bfloat16)  # type: ignore[arg-type]
    if weight.tensors[0].device.type == "cpu":
        # The interpreter multiplies bf16 numbers as integers. All values are exact in float32 too.
        dot = tl.float32
    if x_kind == "fp8":
        dot = tl.float8e4nv
    plain_kinds = {"fp8": "plain"}
    return {
        "X_KIND": plain_kinds.get(x_kind, x_kind), "X_SCALE": x_scale, "X_BLOCK_ROWS": x_rows, "X_BLOCK_COLS": x_cols,
        "W_KIND": plain_kinds.get(w_kind, w_kind), "W_SCALE": w_scale, "W_BLOCK_ROWS": w_rows, "W_BLOCK_COLS": w_cols,
        "X_GLOBAL": x_global, "W_GLOBAL": w_global, "LATE": late, "DOT": dot,
        "ROWS": tiles.rows, "FEATURES": tiles.features, "DEPTH": tiles.depth,
    }  # fmt: skip


def prepared(
    x: torch.Tensor | QuantizedTensor, weight: torch.Tensor | QuantizedTensor, x_parts: Operand, weight_parts: Operand
) -> tuple[Operand, Operand]:
    """Let the matrix unit have fp8 values as they are, where both operands are e4m3 with wide scales and the device can.

    Args:
        x: rows.
        weight: features.
        x_parts: x taken apart.
        weight_parts: weight taken apart.
    """
    both = (x, weight)
    if any(not isinstance(one, QuantizedTensor) or one.format.logical != "fp8_e4m3" for one in both):
        return x_parts, weight_parts
    if not _multiplies_fp8(weight.device):
        return x_parts, weight_parts
    return tuple(  # type: ignore[return-value]
        parts._replace(
            tensors=(one.data, *parts.tensors[1:]),
            constants=("fp8", *parts.constants[1:]),
        )
        for one, parts in zip(both, (x_parts, weight_parts), strict=True)
    )


@functools.cache
def _multiplies_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx95")
    return torch.cuda.get_device_capability(device) >= (8, 9)


def choose_tiles(num_rows: int, x: Operand, weight: Operand, *, wide: bool, amd: bool) -> Tiles:
    """Few rows: narrow tiles that are deep, so that enough loads are in flight. Many: square ones, as large as registers allow.

    Args:
        num_rows: rows of x that share a weight, about.
        x: rows.
        weight: features.
        wide: values enter the matrix unit as float32, for which tiles must be smaller.
        amd: shared memory is 64 KiB there.
    """
    if wide:
        tiles = Tiles(16, 32, 64, 4, 2) if num_rows <= 16 else Tiles(32, 64, 32, 4, 2)
    elif weight.constants[0] == "plain":
        few = Tiles(16, 64, 128, 4, 4) if num_rows <= 16 else Tiles(64, 64, 64, 4, 4)
        tiles = few if num_rows <= 64 else Tiles(128, 128, 64, 8, 3)
    elif weight.constants[0] == "fp8":
        few = Tiles(16, 64, 128, 4, 4) if num_rows <= 16 else Tiles(64, 64, 128, 4, 4)
        tiles = few if num_rows <= 64 else Tiles(128, 128, 128, 8, 3)
    else:
        # Codes are decoded in registers on their way to the matrix unit.
        few = Tiles(16, 64, 128, 4, 3) if num_rows <= 16 else Tiles(64, 64, 64, 4, 3)
        tiles = few if num_rows <= 64 else Tiles(128, 128, 64, 8, 2)
        if weight.constants[0].startswith("gguf"):
            # Each element finds its block and its scales: with more of them to a thread, registers spill.
            tiles = tiles._replace(depth=64)
    return tiles._replace(num_stages=min(tiles.num_stages, 2)) if amd else tiles

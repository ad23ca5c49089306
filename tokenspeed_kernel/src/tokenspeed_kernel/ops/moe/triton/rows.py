"""Rows that experts multiply: as they are, or as fp8 codes with a scale for each row or for each 128 columns.

Where the device has fp8, codes go into the matrix unit as they are; elsewhere they become float16, which holds each of them. Their
scales multiply float32 sums, and round nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.moe.triton import weights
from tokenspeed_kernel.ops.moe.triton.weights import from_e4m3
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["Rows", "describe_rows", "row_values"]

_DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Rows(NamedTuple):
    """Rows as kernels take them.

    Attributes:
        data, scale: values and their scales; a stand-in that no program reads where there are none.
        strides: of the values by row and column; of the scales by row and block of columns.
        constants: names and values of the compile-time constants that describe them. DOT is what a tile of the weight becomes.
    """

    data: torch.Tensor
    scale: torch.Tensor
    strides: tuple[int, int, int, int]
    constants: dict[str, Any]


def describe_rows(x: torch.Tensor | QuantizedTensor) -> Rows:
    """Return what kernels are told about rows [num_rows, columns], fp8_e4m3@token or @block_1x128 where they are quantized."""
    if isinstance(x, torch.Tensor):
        return Rows(x, x, (x.stride(0), x.stride(1), 0, 0), {"X_KIND": "plain", "X_COLS": 0, "DOT": _DTYPES[x.dtype]})
    assert x.scale is not None
    native = weights.has_fp8(x.device)
    data = x.data if native else x.data.view(torch.uint8)
    constants = {
        "X_KIND": "fp8" if native else "e4m3",
        "X_COLS": x.format.block[1],
        "DOT": tl.float8e4nv if native else tl.float16,
    }
    return Rows(data, x.scale, (data.stride(0), data.stride(1), x.scale.stride(0), x.scale.stride(1)), constants)


@triton.jit
def row_values(stored, X_KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Values of what was loaded, without scales, in DTYPE, which holds each of them."""
    if X_KIND == "e4m3":
        values = from_e4m3(stored).to(DTYPE)
    else:
        values = stored.to(DTYPE)
    return values

"""Matrix products of which an operand is in a scaled format: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import math

import torch
from torch import is_grad_enabled

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm.contract import MANY_ROWS, MM
from tokenspeed_kernel.ops.gemm.parts import data_of, kind_of, put_together, schema, taken_apart, wants_gradient
from tokenspeed_kernel.ops.operands import check_operands, tensor_error
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["compile_scaled", "run_scaled"]

_mm = BoundOp(MM)
_table = _mm.table
_DEFAULT_OUT = torch.bfloat16
"""Dtype of a product whose x is quantized too, where nobody asked for one."""


def compile_scaled(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    solution: str | None,
) -> torch.Tensor:
    """`tokenspeed_kernel.ops.gemm.mm` while compiling."""
    dtype = out_dtype if out_dtype is not None or out is None else out.dtype
    result: torch.Tensor = _library_mm(*taken_apart(x), *taken_apart(weight), bias, dtype, solution)
    return result if out is None else out.copy_(result)


def run_scaled(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    solution: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tokenspeed_kernel.ops.gemm.mm` at run time."""
    try:
        shape, weight_shape, device = x.shape, weight.shape, x.device
    except AttributeError:
        raise tensor_error(MM.name, x=x, weight=weight) from None
    if not shape or len(weight_shape) != 2 or shape[-1] != weight_shape[1]:
        raise ShapeError(
            MM.name,
            expected="x [..., in_features] and weight [out_features, in_features]",
            got=f"x {list(shape)} and weight {list(weight_shape)}",
            fix="the last dimensions of x and weight must be equal",
        )
    features = weight_shape[0]
    bias_dtype = None
    if bias is not None:
        if bias.shape != (features,):
            raise ShapeError(MM.name, expected=f"bias [{features}]", got=f"bias {list(bias.shape)}")
        bias_dtype = bias.dtype
    # A format hashes slowly; its two names, which say the same, do not.
    x_format, weight_format = getattr(x, "format", None), getattr(weight, "format", None)
    x_kind = x.dtype if x_format is None else (x_format.logical, x_format.scale)  # type: ignore[union-attr]
    weight_kind = weight.dtype if weight_format is None else (weight_format.logical, weight_format.scale)  # type: ignore[union-attr]
    if out is not None:
        out_dtype = out_dtype or out.dtype
        if out.shape != (*shape[:-1], features) or out.dtype is not out_dtype:
            raise ShapeError(
                MM.name,
                expected=f"out {[*shape[:-1], features]} {out_dtype}",
                got=f"{list(out.shape)} {out.dtype}",
                fix="give out the shape of the product and the dtype that out_dtype asks for",
            )
    elif out_dtype is None:
        out_dtype = x.dtype if x_format is None else _DEFAULT_OUT  # type: ignore[union-attr]  # x is plain
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    max_rows = MANY_ROWS if rows > 64 else 64 if rows > 16 else 16 if rows > 1 else 1
    others = None if bias is None else bias.device, None if out is None else out.device
    key = (device, weight.device, others, x_kind, weight_kind, bias_dtype, out_dtype, max_rows, solution)
    kernel = _table.get(key)
    if kernel is None:
        check_operands(MM.name, x=x, weight=weight, bias=bias, out=out)
        parts = {"x": data_of(x), "weight": data_of(weight), "bias": bias, "out": out}
        check_devices(MM.name, device, **parts)
        kernel = _mm.bind(key, device, (kind_of(x), kind_of(weight), bias_dtype, out_dtype), (max_rows,), solution)
    if is_grad_enabled() and wants_gradient(x, weight, bias):
        with torch.no_grad():
            result: torch.Tensor = kernel(x, weight, bias, out=out, out_dtype=out_dtype)
        return result
    result = kernel(x, weight, bias, out=out, out_dtype=out_dtype)
    return result


def _run_library(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    x_global_scale: torch.Tensor | None,
    x_zero_point: torch.Tensor | None,
    x_format: str,
    x_shape: list[int],
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    left = put_together(x, x_scale, x_global_scale, x_zero_point, x_format, x_shape)
    right = put_together(weight, scale, global_scale, zero_point, fmt, shape)
    return run_scaled(left, right, bias, out_dtype, solution)


def _fake(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    x_global_scale: torch.Tensor | None,
    x_zero_point: torch.Tensor | None,
    x_format: str,
    x_shape: list[int],
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    leading = x_shape[:-1] if x_format else x.shape[:-1]
    default = _DEFAULT_OUT if x_format else x.dtype
    return x.new_empty((*leading, shape[0] if fmt else weight.shape[0]), dtype=out_dtype or default)


_library_mm = register_library_op(
    f"mm_scaled({schema('x', 'x_')}, {schema('weight')}, "
    "Tensor? bias=None, ScalarType? out_dtype=None, str? solution=None) -> Tensor",
    _run_library,
    _fake,
)

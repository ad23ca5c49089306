"""Public matrix products: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import math

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm.contract import MANY_ROWS, MM
from tokenspeed_kernel.ops.gemm.scaled import compile_scaled, run_scaled
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm"]

_mm = BoundOp(MM)
_mm_table = _mm.table


def mm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Multiply by a weight stored as in a linear layer: `x @ weight.T + bias`.

    fp32 operands give IEEE float32 products, also on a GPU where tf32 is allowed. For inference only: no gradient flows, and
    the result never requires one.

    Args:
        x: [..., in_features] fp32, bf16 or fp16, any strides; or a `QuantizedTensor` of fp8, mxfp8, mxfp4 or nvfp4.
        weight: [out_features, in_features], dtype of x, any strides; or a `QuantizedTensor` in any format, with any x.
        bias: optional [out_features], dtype of x (of the result, for a quantized x) or fp32.
        out: optional [..., out_features], written in place; it must not overlap an input.
        out_dtype: dtype of the result: x's, or fp32; that of out, else of x (bf16 for a quantized x), where left out.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [..., out_features] of out_dtype.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Dongarra et al., A Set of Level 3 Basic Linear Algebra Subprograms, ACM TOMS 16 (1990) (GEMM); formats:
        `docs/contracts/quantization.md`.
    """
    if is_compiling():
        if type(weight) is QuantizedTensor or type(x) is QuantizedTensor:
            return compile_scaled(x, weight, bias, out, out_dtype, solution)
        dtype = out_dtype if out_dtype is not None or out is None else out.dtype
        result: torch.Tensor = _library_mm(x, weight, bias, dtype, solution)
        return result if out is None else out.copy_(result)
    try:
        if type(weight) is QuantizedTensor or type(x) is QuantizedTensor:
            return run_scaled(x, weight, bias, out_dtype, solution, out)
        return _run_mm(x, weight, bias, out_dtype, solution, out)  # type: ignore[arg-type]  # neither is quantized
    except OPERAND_ERRORS as error:
        refuse_kinds(mm, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    try:
        shape, weight_shape, dtype, device = x.shape, weight.shape, x.dtype, x.device
    except AttributeError:
        raise tensor_error(MM.name, x=x, weight=weight) from None
    if not shape or len(weight_shape) != 2 or shape[-1] != weight_shape[1]:
        raise ShapeError(
            MM.name,
            expected="x [..., in_features] and weight [out_features, in_features]",
            got=f"x {list(shape)} and weight {list(weight_shape)}",
            fix="the last dimensions of x and weight must be equal; a weight stored as [in, out] needs .t()",
        )
    bias_dtype = None
    if bias is not None:
        if bias.shape != (weight_shape[0],):
            raise ShapeError(MM.name, expected=f"bias [{weight_shape[0]}]", got=f"bias {list(bias.shape)}")
        bias_dtype = bias.dtype
    if out is not None:
        features = weight_shape[0]
        wanted = (shape[0], features) if len(shape) == 2 else (*shape[:-1], features)
        if out_dtype is None:
            out_dtype = out.dtype
        if out.shape != wanted or out.dtype is not out_dtype:
            raise ShapeError(
                MM.name,
                expected=f"out {list(wanted)} {out_dtype}",
                got=f"{list(out.shape)} {out.dtype}",
                fix="give out the shape of the product and the dtype that out_dtype asks for",
            )
    elif out_dtype is None:
        out_dtype = dtype
    weight_dtype = weight.dtype
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    max_rows = MANY_ROWS if rows > 64 else 64 if rows > 16 else 16 if rows > 1 else 1
    key = (
        device,
        weight.device,
        None if bias is None else bias.device,
        None if out is None else out.device,
        dtype,
        weight_dtype,
        bias_dtype,
        out_dtype,
        max_rows,
        solution,
    )
    kernel = _mm_table.get(key)
    if kernel is None:
        check_operands(MM.name, x=x, weight=weight, bias=bias, out=out)
        check_devices(MM.name, device, weight=weight, bias=bias, out=out)
        kernel = _mm.bind(key, device, (dtype, weight_dtype, bias_dtype, out_dtype), (max_rows,), solution)
    if is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        with torch.no_grad():
            result: torch.Tensor = kernel(x, weight, bias, out=out, out_dtype=out_dtype)
        return result
    result = kernel(x, weight, bias, out=out, out_dtype=out_dtype)
    return result


def _fake_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


_library_mm = register_library_op(
    "mm(Tensor x, Tensor weight, Tensor? bias=None, ScalarType? out_dtype=None, str? solution=None) -> Tensor",
    _run_mm,
    _fake_mm,
)

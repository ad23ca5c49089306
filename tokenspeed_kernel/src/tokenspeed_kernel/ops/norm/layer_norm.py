"""Public layer norm."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.norm.checks import check_dtypes, like_error, weight_error
from tokenspeed_kernel.ops.norm.contract import LAYER_NORM
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["layer_norm"]

_bound = BoundOp(LAYER_NORM)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Subtract each row's mean, divide by its standard deviation, scale and shift it.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        weight: [hidden], dtype of x or fp32.
        bias: optional [hidden] of weight's dtype.
        eps: added to the variance, which divides by hidden, not by hidden - 1; dimensionless.
        out: optional, shape and dtype of x, written in place; it may be x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450, equations 3 and 4.
    """
    if is_compiling():
        result: torch.Tensor = _library_op(x, weight, bias, eps, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run(x, weight, bias, eps, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(layer_norm, locals(), error)
        raise


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    op = LAYER_NORM.name
    shape, device = x.shape, x.device
    if not shape or weight.shape != (shape[-1],):
        raise weight_error(op, x, weight)
    if bias is not None and bias.shape != weight.shape:
        raise weight_error(op, x, bias, "bias")
    if out is not None and out.shape != shape:
        raise like_error(op, "out", x, out)
    dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
    given = tuple(None if one is None else (one.dtype, one.device) for one in (bias, out))
    key = (device, weight.device, dtypes, given, solution)
    kernel = _bound.table.get(key)
    if kernel is None:
        check_devices(op, device, weight=weight, bias=bias, out=out)
        check_dtypes(op, x, out=out)
        if bias is not None and bias.dtype is not weight.dtype:
            expected, got = f"bias of weight's dtype, {weight.dtype}", str(bias.dtype)
            raise ShapeError(op, expected=expected, got=got, fix=f"pass bias.to({weight.dtype})")
        kernel = _bound.bind(key, device, dtypes, (), solution)
    result: torch.Tensor = kernel(x, weight, bias, eps=eps, out=out)
    return result


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, solution: str | None = None
) -> torch.Tensor:
    return x.new_empty(x.shape)


_library_op = register_library_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, str? solution=None) -> Tensor", _run, _fake
)

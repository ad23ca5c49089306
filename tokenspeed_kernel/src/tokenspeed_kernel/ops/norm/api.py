"""Public norm ops: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.norm.checks import check_dtypes, like_error, weight_error
from tokenspeed_kernel.ops.norm.contract import FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["fused_add_rms_norm", "rms_norm"]

_FUSED = FUSED_ADD_RMS_NORM.name

_rms_norm = BoundOp(RMS_NORM)
_rms_norm_table = _rms_norm.table
_fused_add_rms_norm = BoundOp(FUSED_ADD_RMS_NORM)
_fused_add_rms_norm_table = _fused_add_rms_norm.table


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Divide each row by its root mean square, and scale it.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        weight: [hidden], dtype of x or fp32.
        eps: added to the mean of squares; dimensionless.
        out: optional, shape and dtype of x, written in place; it may be x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """
    if is_compiling():
        result = _library_rms_norm(x, weight, eps, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_rms_norm(x, weight, eps, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(rms_norm, locals(), error)
        raise


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, and normalize the sum: `residual_out = x + residual; out = rms_norm(residual_out)`.

    The norm is taken of the sum as rounded to the output's dtype, so that it agrees with the two separate ops.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        residual: as x.
        weight: [hidden], dtype of x or fp32.
        eps: added to the mean of squares; dimensionless.
        out: optional, shape and dtype of x, written in place; it may be x.
        residual_out: optional, shape and dtype of x, written in place; it may be residual. It must not be `out`.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        (out, residual_out), new contiguous tensors where not given.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """
    if is_compiling():
        normed, total = _library_fused_add_rms_norm(x, residual, weight, eps, solution)
        return (normed if out is None else out.copy_(normed), total if residual_out is None else residual_out.copy_(total))
    try:
        return _run_fused_add_rms_norm(x, residual, weight, eps, solution, out, residual_out)
    except OPERAND_ERRORS as error:
        refuse_kinds(fused_add_rms_norm, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    shape, dtype, weight_dtype = x.shape, x.dtype, weight.dtype
    if not shape or weight.shape != (shape[-1],):
        raise weight_error(RMS_NORM.name, x, weight)
    if out is not None and out.shape != shape:
        raise like_error(RMS_NORM.name, "out", x, out)
    device = x.device
    out_key = None if out is None else (out.dtype, out.device)
    key = (device, weight.device, dtype, weight_dtype, out_key, solution)
    kernel = _rms_norm_table.get(key)
    if kernel is None:
        check_devices(RMS_NORM.name, device, weight=weight, out=out)
        check_dtypes(RMS_NORM.name, x, out=out)
        kernel = _rms_norm.bind(key, device, (dtype, weight_dtype), (), solution)
    result: torch.Tensor = kernel(x, weight, eps=eps, out=out)
    return result


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, solution: str | None = None) -> torch.Tensor:
    return x.new_empty(x.shape)


def _run_fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    solution: str | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = _FUSED
    shape, dtype, residual_dtype, weight_dtype = x.shape, x.dtype, residual.dtype, weight.dtype
    if not shape or weight.shape != (shape[-1],):
        raise weight_error(op, x, weight)
    if residual.shape != shape:
        raise like_error(op, "residual", x, residual)
    if out is not None and out.shape != shape:
        raise like_error(op, "out", x, out)
    if residual_out is not None:
        if residual_out.shape != shape:
            raise like_error(op, "residual_out", x, residual_out)
        if residual_out is out:
            raise ShapeError(op, expected="out and residual_out apart", got="one tensor for both", fix="give two")
    device = x.device
    key = (
        device,
        residual.device,
        weight.device,
        dtype,
        residual_dtype,
        weight_dtype,
        None if out is None else (out.dtype, out.device),
        None if residual_out is None else (residual_out.dtype, residual_out.device),
        solution,
    )
    kernel = _fused_add_rms_norm_table.get(key)
    if kernel is None:
        check_devices(op, device, residual=residual, weight=weight, out=out, residual_out=residual_out)
        check_dtypes(op, x, residual=residual, out=out, residual_out=residual_out)
        kernel = _fused_add_rms_norm.bind(key, device, (dtype, residual_dtype, weight_dtype), (), solution)
    result: tuple[torch.Tensor, torch.Tensor] = kernel(x, residual, weight, eps=eps, out=out, residual_out=residual_out)
    return result


def _fake_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, solution: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_library_rms_norm = register_library_op(
    "rms_norm(Tensor x, Tensor weight, float eps, str? solution=None) -> Tensor", _run_rms_norm, _fake_rms_norm
)
_library_fused_add_rms_norm = register_library_op(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str? solution=None) -> (Tensor, Tensor)",
    _run_fused_add_rms_norm,
    _fake_fused_add_rms_norm,
)

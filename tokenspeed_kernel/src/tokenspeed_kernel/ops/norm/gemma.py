"""Public RMS norms whose weight is stored as its distance from 1."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.norm.checks import check_dtypes, like_error, weight_error
from tokenspeed_kernel.ops.norm.contract import FUSED_ADD_GEMMA_RMS_NORM, GEMMA_RMS_NORM
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["fused_add_gemma_rms_norm", "gemma_rms_norm"]

_plain = BoundOp(GEMMA_RMS_NORM)
_fused = BoundOp(FUSED_ADD_GEMMA_RMS_NORM)


def gemma_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Divide each row by its root mean square, and scale it by 1 + weight.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        weight: [hidden], dtype of x or fp32; 0 leaves the normalized row as it is. The sum is taken in float32.
        eps: added to the mean of squares; dimensionless.
        out: optional, shape and dtype of x, written in place; it may be x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4, with gain 1 + weight.
    """
    if is_compiling():
        result: torch.Tensor = _library_plain(x, weight, eps, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_plain(x, weight, eps, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(gemma_rms_norm, locals(), error)
        raise


def fused_add_gemma_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, and normalize the sum: `residual_out = x + residual; out = gemma_rms_norm(residual_out)`.

    The norm is taken of the sum as rounded to the output's dtype, so that it agrees with the two separate ops.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        residual: as x.
        weight: [hidden], dtype of x or fp32; 0 leaves the normalized row as it is. The sum is taken in float32.
        eps: added to the mean of squares; dimensionless.
        out: optional, shape and dtype of x, written in place; it may be x.
        residual_out: optional, shape and dtype of x, written in place; it may be residual. It must not be `out`.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        (out, residual_out), new contiguous tensors where not given.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4, with gain 1 + weight.
    """
    if is_compiling():
        normed, total = _library_fused(x, residual, weight, eps, solution)
        return (normed if out is None else out.copy_(normed), total if residual_out is None else residual_out.copy_(total))
    try:
        return _run_fused(x, residual, weight, eps, solution, out, residual_out)
    except OPERAND_ERRORS as error:
        refuse_kinds(fused_add_gemma_rms_norm, locals(), error)
        raise


def _run_plain(
    x: torch.Tensor, weight: torch.Tensor, eps: float, solution: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    op = GEMMA_RMS_NORM.name
    shape, dtype, device = x.shape, x.dtype, x.device
    if not shape or weight.shape != (shape[-1],):
        raise weight_error(op, x, weight)
    if out is not None and out.shape != shape:
        raise like_error(op, "out", x, out)
    key = (device, weight.device, dtype, weight.dtype, None if out is None else (out.dtype, out.device), solution)
    kernel = _plain.table.get(key)
    if kernel is None:
        check_devices(op, device, weight=weight, out=out)
        check_dtypes(op, x, out=out)
        kernel = _plain.bind(key, device, (dtype, weight.dtype), (), solution)
    result: torch.Tensor = kernel(x, weight, eps=eps, out=out)
    return result


def _run_fused(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    solution: str | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = FUSED_ADD_GEMMA_RMS_NORM.name
    shape, device, dtypes = x.shape, x.device, (x.dtype, residual.dtype, weight.dtype)
    if not shape or weight.shape != (shape[-1],):
        raise weight_error(op, x, weight)
    for name, other in (("residual", residual), ("out", out), ("residual_out", residual_out)):
        if other is not None and other.shape != shape:
            raise like_error(op, name, x, other)
    if out is not None and residual_out is out:
        raise ShapeError(op, expected="out and residual_out apart", got="one tensor for both", fix="give two")
    given = tuple(None if one is None else (one.dtype, one.device) for one in (out, residual_out))
    key = (device, residual.device, weight.device, dtypes, given, solution)
    kernel = _fused.table.get(key)
    if kernel is None:
        check_devices(op, device, residual=residual, weight=weight, out=out, residual_out=residual_out)
        check_dtypes(op, x, residual=residual, out=out, residual_out=residual_out)
        kernel = _fused.bind(key, device, dtypes, (), solution)
    result: tuple[torch.Tensor, torch.Tensor] = kernel(x, residual, weight, eps=eps, out=out, residual_out=residual_out)
    return result


def _fake_plain(x: torch.Tensor, weight: torch.Tensor, eps: float, solution: str | None = None) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_fused(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, solution: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_library_plain = register_library_op(
    "gemma_rms_norm(Tensor x, Tensor weight, float eps, str? solution=None) -> Tensor", _run_plain, _fake_plain
)
_library_fused = register_library_op(
    "fused_add_gemma_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str? solution=None) -> (Tensor, Tensor)",
    _run_fused,
    _fake_fused,
)

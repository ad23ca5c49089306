"""Public activation ops: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, Kernel, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.activation.contract import GELU_AND_MUL, SILU_AND_MUL, SWIGLU_CLAMPED
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["gelu_and_mul", "silu_and_mul", "swiglu_clamped"]

_silu_and_mul = BoundOp(SILU_AND_MUL)
_silu_and_mul_table = _silu_and_mul.table
_swiglu_clamped = BoundOp(SWIGLU_CLAMPED)
_gelu_and_mul = BoundOp(GELU_AND_MUL)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None, solution: str | None = None) -> torch.Tensor:
    """Gate one half of each row with the SiLU of the other: `gate / (1 + exp(-gate)) * up`.

    Args:
        gate_up: [..., 2 * inner] fp32, bf16 or fp16, any strides; the first half is the gate.
        out: optional [..., inner], dtype of gate_up, written in place; it must not overlap gate_up.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [..., inner] of gate_up's dtype.
    Raises:
        ShapeError: the last dimension is odd, or out does not fit.  NoKernelError: nothing qualifies.
    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 5 (SwiGLU).
    """
    if is_compiling():
        result: torch.Tensor = _library_silu_and_mul(gate_up, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_silu_and_mul(gate_up, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(silu_and_mul, locals(), error)
        raise


def swiglu_clamped(
    gate_up: torch.Tensor,
    limit: float,
    *,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Gate and multiply within limits: `g * sigmoid(alpha * g) * (u + up_offset)`, g = min(gate, limit), u = up in [-limit, limit].

    Args:
        gate_up: [..., 2 * inner] fp32, bf16 or fp16, any strides.
        limit: largest gate, and largest magnitude of up; above 0, dimensionless. Infinity clamps nothing.
        alpha: steepness of the sigmoid; dimensionless.
        up_offset: added to the clamped up.
        interleaved: gate and up alternate (`gate, up, gate, up, ...`); otherwise the first half is the gate.
        out: optional [..., inner], dtype of gate_up, written in place; it must not overlap gate_up.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [..., inner] of gate_up's dtype.
    Raises:
        ShapeError: the last dimension is odd, out does not fit, or limit is not above 0.  NoKernelError: nothing qualifies.
    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 5; the limits: OpenAI, gpt-oss model card,
        arXiv:2508.10925, section 2.2.
    """
    if is_compiling():
        result: torch.Tensor = _library_swiglu_clamped(gate_up, limit, alpha, up_offset, interleaved, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_swiglu_clamped(gate_up, limit, alpha, up_offset, interleaved, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(swiglu_clamped, locals(), error)
        raise


def gelu_and_mul(
    gate_up: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None, solution: str | None = None
) -> torch.Tensor:
    """Gate one half of each row with the GELU of the other: `gelu(gate) * up`.

    Args:
        gate_up: [..., 2 * inner] fp32, bf16 or fp16, any strides; the first half is the gate.
        approximate: `none`, with the error function, or `tanh`.
        out: optional [..., inner], dtype of gate_up, written in place; it must not overlap gate_up.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [..., inner] of gate_up's dtype.
    Raises:
        ShapeError: the last dimension is odd, out does not fit, or approximate is another word.  NoKernelError: nothing
            qualifies.
    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 5 (GEGLU); Hendrycks and Gimpel, Gaussian Error
        Linear Units, arXiv:1606.08415, section 2.
    """
    if is_compiling():
        result: torch.Tensor = _library_gelu_and_mul(gate_up, approximate, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_gelu_and_mul(gate_up, approximate, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(gelu_and_mul, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_silu_and_mul(gate_up: torch.Tensor, solution: str | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    shape, dtype = gate_up.shape, gate_up.dtype
    if not shape or shape[-1] % 2:
        raise _halves_error(SILU_AND_MUL.name, gate_up)
    if out is not None:
        inner = shape[-1] // 2
        wanted = (shape[0], inner) if len(shape) == 2 else (*shape[:-1], inner)
        if out.shape != wanted:
            raise _out_error(SILU_AND_MUL.name, gate_up, out)
    device = gate_up.device
    key = (device, dtype, None if out is None else (out.dtype, out.device), solution)
    kernel = _silu_and_mul_table.get(key)
    if kernel is None:
        if out is not None and out.dtype is not dtype:
            raise _out_error(SILU_AND_MUL.name, gate_up, out)
        check_devices(SILU_AND_MUL.name, device, out=out)
        kernel = _silu_and_mul.bind(key, device, (dtype,), (), solution)
    result: torch.Tensor = kernel(gate_up, out=out)
    return result


def _run_swiglu_clamped(
    gate_up: torch.Tensor,
    limit: float,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    interleaved: bool = False,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if not limit > 0:
        raise ShapeError(SWIGLU_CLAMPED.name, expected="limit > 0", got=f"limit={limit}", fix="pass math.inf to clamp nothing")
    kernel = _kernel(_swiglu_clamped, gate_up, out, solution)
    result: torch.Tensor = kernel(gate_up, limit, alpha=alpha, up_offset=up_offset, interleaved=interleaved, out=out)
    return result


def _run_gelu_and_mul(
    gate_up: torch.Tensor, approximate: str = "none", solution: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    if approximate not in ("none", "tanh"):
        raise ShapeError(GELU_AND_MUL.name, expected='approximate "none" or "tanh"', got=f"{approximate!r}")
    result: torch.Tensor = _kernel(_gelu_and_mul, gate_up, out, solution)(gate_up, approximate=approximate, out=out)
    return result


def _kernel(op: BoundOp, gate_up: torch.Tensor, out: torch.Tensor | None, solution: str | None) -> Kernel:
    """Check the operands of a gated op, and return its kernel."""
    shape, dtype, device = gate_up.shape, gate_up.dtype, gate_up.device
    if not shape or shape[-1] % 2:
        raise _halves_error(op.contract.name, gate_up)
    if out is not None and out.shape != (*shape[:-1], shape[-1] // 2):
        raise _out_error(op.contract.name, gate_up, out)
    key = (device, dtype, None if out is None else (out.dtype, out.device), solution)
    kernel = op.table.get(key)
    if kernel is None:
        if out is not None and out.dtype is not dtype:
            raise _out_error(op.contract.name, gate_up, out)
        check_devices(op.contract.name, device, out=out)
        kernel = op.bind(key, device, (dtype,), (), solution)
    return kernel


def _halves_error(op: str, gate_up: torch.Tensor) -> ShapeError:
    return ShapeError(
        op,
        expected="gate_up [..., 2 * inner]",
        got=f"gate_up {list(gate_up.shape)}",
        fix="concatenate gate and up along the last dimension",
    )


def _out_error(op: str, gate_up: torch.Tensor, out: torch.Tensor) -> ShapeError:
    wanted = [*gate_up.shape[:-1], gate_up.shape[-1] // 2]
    return ShapeError(
        op,
        expected=f"out {wanted} {gate_up.dtype}",
        got=f"{list(out.shape)} {out.dtype}",
        fix="give out half of gate_up's last dimension and its dtype",
    )


def _fake_gated(gate_up: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


_library_silu_and_mul = register_library_op(
    "silu_and_mul(Tensor gate_up, str? solution=None) -> Tensor", _run_silu_and_mul, _fake_gated
)
_library_swiglu_clamped = register_library_op(
    "swiglu_clamped(Tensor gate_up, float limit, float alpha=1.0, float up_offset=0.0, bool interleaved=False, "
    "str? solution=None) -> Tensor",
    _run_swiglu_clamped,
    _fake_gated,
)
_library_gelu_and_mul = register_library_op(
    'gelu_and_mul(Tensor gate_up, str approximate="none", str? solution=None) -> Tensor', _run_gelu_and_mul, _fake_gated
)

"""Public activation ops: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.activation.contract import SILU_AND_MUL

__all__ = ["silu_and_mul"]

_silu_and_mul = BoundOp(SILU_AND_MUL)
_silu_and_mul_table = _silu_and_mul.table


def silu_and_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, solution: str | None = None
) -> torch.Tensor:
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
    return _run_silu_and_mul(gate_up, solution, out)


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_silu_and_mul(
    gate_up: torch.Tensor, solution: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    shape, dtype = gate_up.shape, gate_up.dtype
    if not shape or shape[-1] % 2:
        raise ShapeError(
            SILU_AND_MUL.name,
            expected="gate_up [..., 2 * inner]",
            got=f"gate_up {list(shape)}",
            fix="concatenate gate and up along the last dimension",
        )
    if out is not None:
        inner = shape[-1] // 2
        wanted = (shape[0], inner) if len(shape) == 2 else (*shape[:-1], inner)
        if out.shape != wanted:
            raise _out_error(gate_up, out)
    device = gate_up.device
    key = (device, dtype, None if out is None else (out.dtype, out.device), solution)
    kernel = _silu_and_mul_table.get(key)
    if kernel is None:
        if out is not None and out.dtype is not dtype:
            raise _out_error(gate_up, out)
        check_devices(SILU_AND_MUL.name, device, out=out)
        kernel = _silu_and_mul.bind(key, device, (dtype,), (), solution)
    result: torch.Tensor = kernel(gate_up, out=out)
    return result


def _out_error(gate_up: torch.Tensor, out: torch.Tensor) -> ShapeError:
    wanted = [*gate_up.shape[:-1], gate_up.shape[-1] // 2]
    return ShapeError(
        SILU_AND_MUL.name,
        expected=f"out {wanted} {gate_up.dtype}",
        got=f"{list(out.shape)} {out.dtype}",
        fix="give out half of gate_up's last dimension and its dtype",
    )


def _fake_silu_and_mul(gate_up: torch.Tensor, solution: str | None = None) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


_library_silu_and_mul = register_library_op(
    "silu_and_mul(Tensor gate_up, str? solution=None) -> Tensor", _run_silu_and_mul, _fake_silu_and_mul
)

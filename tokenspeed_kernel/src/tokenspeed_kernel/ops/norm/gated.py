"""Public RMS norm with a gate, as recurrent layers end in it."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.norm.checks import check_dtypes, like_error, weight_error
from tokenspeed_kernel.ops.norm.contract import GATED_RMS_NORM
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["gated_rms_norm"]

_bound = BoundOp(GATED_RMS_NORM)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Normalize each row, or each group of its elements, by the root mean square, with a silu gate after or before.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        gate: as x; silu(gate) multiplies.
        weight: [hidden], dtype of x or fp32.
        eps: added to the mean of squares; dimensionless.
        norm_before_gate: True: rms_norm(x, weight) * silu(gate); False: rms_norm(x * silu(gate), weight).
        group_size: neighbouring elements that are normalized together; divides hidden. None: the whole row.
        out: optional, shape and dtype of x, written in place; it may be x or gate.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes disagree, or group_size does not divide hidden.  NoKernelError: nothing qualifies.
    Source: Transformers are SSMs, arXiv:2405.21060, section 7.1 (norm after the gate, in groups); Gated Delta Networks,
        arXiv:2412.06464, section 3.4 (norm before the gate).
    """
    if is_compiling():
        result: torch.Tensor = _library_op(x, gate, weight, eps, norm_before_gate, group_size, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run(x, gate, weight, eps, norm_before_gate, group_size, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(gated_rms_norm, locals(), error)
        raise


def _run(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    norm_before_gate: bool,
    group_size: int | None,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    op = GATED_RMS_NORM.name
    shape, device, dtypes = x.shape, x.device, (x.dtype, gate.dtype, weight.dtype)
    if not shape or weight.shape != (shape[-1],):
        raise weight_error(op, x, weight)
    if gate.shape != shape:
        raise like_error(op, "gate", x, gate)
    if out is not None and out.shape != shape:
        raise like_error(op, "out", x, out)
    if group_size is not None and (group_size < 1 or shape[-1] % group_size):
        expected, fix = f"group_size that divides hidden={shape[-1]}", "pass hidden divided by the number of groups"
        raise ShapeError(op, expected=expected, got=str(group_size), fix=fix)
    given = None if out is None else (out.dtype, out.device)
    key = (device, gate.device, weight.device, dtypes, given, solution)
    kernel = _bound.table.get(key)
    if kernel is None:
        check_devices(op, device, gate=gate, weight=weight, out=out)
        check_dtypes(op, x, gate=gate, out=out)
        kernel = _bound.bind(key, device, dtypes, (), solution)
    result: torch.Tensor = kernel(x, gate, weight, eps=eps, norm_before_gate=norm_before_gate, group_size=group_size, out=out)
    return result


def _fake(x: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_library_op = register_library_op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, bool norm_before_gate, int? group_size, "
    "str? solution=None) -> Tensor",
    _run,
    _fake,
)

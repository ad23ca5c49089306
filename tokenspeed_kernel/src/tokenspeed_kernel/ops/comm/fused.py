"""Public all-reduce with what follows it in a transformer block."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.comm.checks import require_out
from tokenspeed_kernel.ops.comm.contract import ALL_REDUCE_ADD_RMS_NORM
from tokenspeed_kernel.ops.comm.group import Group, group_name, resolve_group
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["all_reduce_add_rms_norm"]

_OP = ALL_REDUCE_ADD_RMS_NORM.name
_fused = BoundOp(ALL_REDUCE_ADD_RMS_NORM)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: Group = None,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum, add and normalize: `residual_out = all_reduce(x) + residual; out = rms_norm(residual_out)`.

    Equal to the separate ops: the sum and the total are rounded to the operand's dtype before the next step.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides; the same shape on each process.
        residual: as x, the same values on each process.
        weight: [hidden], dtype of x or fp32.
        group: process group, its name, or None for all processes.
        eps: added to the mean of squares; dimensionless.
        out: optional, shape and dtype of x, written in place; it may be x.
        residual_out: optional, shape and dtype of x, written in place; it may be residual. It must not be `out`.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        (out, residual_out), new contiguous tensors where not given.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.  GroupError: no such group.  NoKernelError: nothing qualifies.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4; the sum over processes:
        Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    """
    if is_compiling():
        normed, total = _library_fused(x, residual, weight, group_name(_OP, group), eps, solution)
        return (normed if out is None else out.copy_(normed), total if residual_out is None else residual_out.copy_(total))
    try:
        return _run(x, residual, weight, group, eps, solution, out, residual_out)
    except OPERAND_ERRORS as error:
        refuse_kinds(all_reduce_add_rms_norm, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: Group,
    eps: float,
    solution: str | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = x.device
    found, backend, world_size = resolve_group(_OP, group, device)
    operands: tuple[torch.Tensor, ...] = (x, residual, weight)
    if out is not None:
        operands += (out,)
    if residual_out is not None:
        operands += (residual_out,)
    key = (x.shape, backend, world_size, out is None, residual_out is None, solution)
    looks_same, kernel = _fused.seen.get(key, NEW_CALL)
    if not looks_same(*operands) or (out is not None and residual_out is out):
        shape = x.shape
        if not shape or weight.shape != (shape[-1],):
            raise ShapeError(
                _OP, expected="x [..., hidden] and weight [hidden]", got=f"x {list(shape)} and weight {list(weight.shape)}"
            )
        check_devices(_OP, device, weight=weight)
        require_out(_OP, "residual", residual, shape, x)
        if out is not None:
            require_out(_OP, "out", out, shape, x)
        if residual_out is not None:
            require_out(_OP, "residual_out", residual_out, shape, x)
            if residual_out is out:
                raise ShapeError(_OP, expected="out and residual_out apart", got="one tensor for both", fix="give two")
        kernel = _fused.kernel(device, (x.dtype, residual.dtype, weight.dtype), (backend, world_size), solution)
        _fused.remember(key, kernel, *operands)
    result: tuple[torch.Tensor, torch.Tensor] = kernel(x, residual, weight, found, eps, out, residual_out)
    return result


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: str,
    eps: float,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_library_fused = register_library_op(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, str group, float eps, str? solution=None)"
    " -> (Tensor, Tensor)",
    _run,
    _fake,
)

"""RMS norm for float32 rows; see `tokenspeed_kernel.ops.norm` for the contracts."""

from __future__ import annotations

import torch
from torch import get_num_threads

from tokenspeed_kernel_cpu import _kernels
from tokenspeed_kernel_cpu.layout import rows_of


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Divide each row by its root mean square, and scale it."""
    if out is None:
        target = x.new_empty(*x.shape)
    else:
        target = out if out.is_contiguous() else x.new_empty(*x.shape)
    if not weight.is_contiguous():
        weight = weight.contiguous()
    x, rows, inner, outer_stride, inner_stride = rows_of(x)
    _kernels.rms_norm(
        x.data_ptr(), inner, outer_stride, inner_stride, 0, 1, 0, 0, weight.data_ptr(), target.data_ptr(), 0,
        rows, x.shape[-1], eps, get_num_threads(),
    )  # fmt: skip
    return target if out is None or out is target else out.copy_(target)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, and normalize the sum."""
    shape = x.shape
    target = out if out is not None and out.is_contiguous() else x.new_empty(*shape)
    total = residual_out
    if total is None or not total.is_contiguous():
        total = x.new_empty(*shape)
    if not weight.is_contiguous():
        weight = weight.contiguous()
    x, rows, x_inner, x_outer, x_step = rows_of(x)
    residual, _, r_inner, r_outer, r_step = rows_of(residual)
    _kernels.rms_norm(
        x.data_ptr(), x_inner, x_outer, x_step, residual.data_ptr(), r_inner, r_outer, r_step,
        weight.data_ptr(), target.data_ptr(), total.data_ptr(), rows, shape[-1], eps, get_num_threads(),
    )  # fmt: skip
    if residual_out is not None and residual_out is not total:
        residual_out.copy_(total)
        total = residual_out
    if out is not None and out is not target:
        out.copy_(target)
        target = out
    return target, total

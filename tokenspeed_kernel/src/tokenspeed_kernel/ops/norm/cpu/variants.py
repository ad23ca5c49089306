"""The other norms on the CPU, in float32 with PyTorch's vector operations."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from tokenspeed_kernel.ops.norm.cpu import rms_norm as plain

__all__ = ["fused_add_gemma_rms_norm", "gated_rms_norm", "gemma_rms_norm", "layer_norm"]


def gemma_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.gemma_rms_norm`."""
    return plain.rms_norm(x, weight.float() + 1.0, eps=eps, out=out)


def fused_add_gemma_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.norm.fused_add_gemma_rms_norm`."""
    return plain.fused_add_rms_norm(x, residual, weight.float() + 1.0, eps=eps, out=out, residual_out=residual_out)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.layer_norm`."""
    if x.shape[-1] == 0:  # a row without elements has no mean
        return torch.empty(x.shape, dtype=x.dtype) if out is None else out
    shift = None if bias is None else bias.float()
    result = torch.nn.functional.layer_norm(x.float().contiguous(), (x.shape[-1],), weight.float(), shift, eps)
    return result.to(x.dtype) if out is None else out.copy_(result)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.gated_rms_norm`."""
    factor = silu(gate.float())
    values = x.float() if norm_before_gate else factor.mul(x)
    rows = values.reshape(-1, x.shape[-1] if group_size is None else group_size)
    scale = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    result = torch.empty(x.shape)
    torch.mul(rows, scale, out=result.view(rows.shape))
    result.mul_(weight)
    if norm_before_gate:
        result.mul_(factor)
    return result.to(x.dtype) if out is None else out.copy_(result)

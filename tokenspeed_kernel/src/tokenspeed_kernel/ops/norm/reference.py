"""The truth for the norm ops: float64, rounded once."""

from __future__ import annotations

import torch

__all__ = ["fused_add_rms_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.rms_norm`."""
    exact = x.double()
    normed = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.double()
    return normed.to(x.dtype).contiguous() if out is None else out.copy_(normed)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.norm.fused_add_rms_norm`."""
    total = (x.double() + residual.double()).to(x.dtype).contiguous()
    normed = rms_norm(total, weight, eps=eps, out=out)
    return normed, (total if residual_out is None else residual_out.copy_(total))

"""The truth for the norm ops: float64, rounded once."""

from __future__ import annotations

import torch

__all__ = [
    "fused_add_gemma_rms_norm",
    "fused_add_rms_norm",
    "gated_rms_norm",
    "gemma_rms_norm",
    "layer_norm",
    "rms_norm",
]


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


def gemma_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.gemma_rms_norm`."""
    return rms_norm(x, 1.0 + weight.double(), eps=eps, out=out)


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
    return fused_add_rms_norm(x, residual, 1.0 + weight.double(), eps=eps, out=out, residual_out=residual_out)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.layer_norm`."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.double()
    normed = normed if bias is None else normed + bias.double()
    return normed.to(x.dtype).contiguous() if out is None else out.copy_(normed)


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
    factor = torch.nn.functional.silu(gate.double())
    exact = x.double() if norm_before_gate else x.double() * factor
    groups = exact.unflatten(-1, (-1, group_size or max(x.shape[-1], 1)))  # type: ignore[no-untyped-call]
    normed = (groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.double()
    normed = normed * factor if norm_before_gate else normed
    return normed.to(x.dtype).contiguous() if out is None else out.copy_(normed)

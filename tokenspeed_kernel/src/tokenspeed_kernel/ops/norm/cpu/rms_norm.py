"""RMS norm in PyTorch calls chosen for the CPU."""

from __future__ import annotations

import functools

import torch

__all__ = ["fused_add_rms_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.rms_norm`.

    As few calls as possible: after a product has streamed its weights through the cache, a call costs 5 to 10 us, not 1. Baseline:
    torch 2.13, one core, after a [3072, 576] product, the residual's addition included: `torch.rms_norm` 35 us against 17 at
    [1, 576], 45 against 33 at [16, 576], 230 against 140 at [128, 576].
    """
    if x.dtype is not torch.float32:
        result = _normed(x.float(), weight.float(), eps, None)
        return result.to(x.dtype) if out is None else out.copy_(result)
    if out is None or (out.is_contiguous() and weight.dtype is torch.float32):
        return _normed(x, weight, eps, out)
    return out.copy_(_normed(x, weight, eps, None))


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
    if residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.add(x, residual, out=residual_out)
    return rms_norm(residual_out, weight, eps=eps, out=out), residual_out


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), norm, norm, value=1.0 / max(x.shape[-1], 1)).rsqrt_()
    return torch.mul(x, scale, out=out).mul_(weight)


@functools.lru_cache(maxsize=64)
def _constant(value: float) -> torch.Tensor:
    with torch.inference_mode(False):  # whoever made it first, others may need gradients
        return torch.tensor([value])

"""RMS norm of FlashInfer."""

from __future__ import annotations

import torch
from flashinfer import norm as flashinfer_norm

__all__ = ["fused_add_rms_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])  # a copy where the rows do not lie one behind the other
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    direct = out is not None and out.is_contiguous()
    result = out if out is not None and direct else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():  # an empty grid cannot be launched
        flashinfer_norm.rmsnorm(rows, weight.contiguous(), eps, out=result.view(rows.shape))
    return result if out is None or direct else out.copy_(result)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.norm.fused_add_rms_norm`.

    FlashInfer's function works in place: where the caller does not, its operands are copied first.
    """
    normed = _own(x, out)
    total = _own(residual, residual_out)
    if x.numel():
        shape = (-1, x.shape[-1])
        flashinfer_norm.fused_add_rmsnorm(normed.view(shape), total.view(shape), weight.contiguous(), eps)
    return _given(normed, out), _given(total, residual_out)


def _own(source: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """A contiguous tensor with the values of `source`: `out` itself where it can be."""
    if out is not None and out.is_contiguous():
        return out if out is source else out.copy_(source)
    return source.clone(memory_format=torch.contiguous_format)


def _given(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None or out is result else out.copy_(result)

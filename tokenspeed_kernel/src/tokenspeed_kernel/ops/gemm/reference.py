"""The truth for the matrix products: float64, rounded once."""

from __future__ import annotations

import torch

__all__ = ["mm"]


def mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`."""
    result = torch.matmul(x.double(), weight.double().t())
    if bias is not None:
        result = result + bias.double()
    return result.to(out_dtype or x.dtype).contiguous() if out is None else out.copy_(result)

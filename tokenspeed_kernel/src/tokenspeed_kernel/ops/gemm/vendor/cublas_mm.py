"""Matrix product of cuBLAS, as PyTorch calls it. IEEE float32 whatever the process allows elsewhere."""

from __future__ import annotations

import math

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
    if x.dtype is torch.float32:
        matmul = torch.backends.cuda.matmul
        allowed = matmul.fp32_precision
        if allowed not in ("ieee", "none"):
            # Someone allowed tf32 for their own products; ours stay exact, and the setting is put back.
            matmul.fp32_precision = "ieee"
            try:
                return _mm(x, weight, bias, out, torch.float32)
            finally:
                matmul.fp32_precision = allowed
    return _mm(x, weight, bias, out, out_dtype or x.dtype)


def _mm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out_features, in_features = weight.shape
    shape = (*x.shape[:-1], out_features)
    rows = x.reshape(math.prod(shape[:-1]), in_features)
    if dtype is not x.dtype:
        # A wider output: cuBLAS writes its accumulator, so nothing is rounded to half precision on the way.
        product = torch.mm(rows, weight.t(), out_dtype=dtype)
        product = product if bias is None else product.add_(bias)
    elif out is not None and out.is_contiguous():
        target = out.view(rows.shape[0], out_features)  # -1 would be ambiguous without features
        if bias is None:
            torch.mm(rows, weight.t(), out=target)
        else:
            torch.addmm(bias, rows, weight.t(), out=target)
        return out
    else:
        product = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return product.view(shape) if out is None else out.copy_(product.view(shape))

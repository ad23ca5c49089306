"""Products of stacks by cuBLAS, as PyTorch calls it. IEEE float32 whatever the process allows elsewhere."""

from __future__ import annotations

import torch

__all__ = ["bmm"]


def bmm(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.bmm`."""
    if x.dtype is torch.float32:
        matmul = torch.backends.cuda.matmul
        allowed = matmul.fp32_precision
        if allowed not in ("ieee", "none"):
            # Someone allowed tf32 for their own products; ours stay exact, and the setting is put back.
            matmul.fp32_precision = "ieee"
            try:
                return _bmm(x, weight, out, torch.float32)
            finally:
                matmul.fp32_precision = allowed
    return _bmm(x, weight, out, out_dtype or x.dtype)


def _bmm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if dtype is not x.dtype:
        # A wider output: cuBLAS writes its accumulator, so nothing is rounded to half precision on the way.
        product = torch.bmm(x, weight.mT, out_dtype=dtype)
        return product if out is None else out.copy_(product)
    if out is not None and out.is_contiguous():
        return torch.bmm(x, weight.mT, out=out)
    product = torch.bmm(x, weight.mT)
    return product if out is None else out.copy_(product)

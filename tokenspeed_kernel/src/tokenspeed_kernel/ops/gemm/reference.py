"""The truth for the matrix products: float64, rounded once."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.quantization.reference_decode import decode
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm"]


def mm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`."""
    result = torch.matmul(_exact(x), _exact(weight).t())
    if bias is not None:
        result = result + bias.double()
    if out is not None:
        return out.copy_(result)
    assert out_dtype is not None
    return result.to(out_dtype).contiguous()


def _exact(operand: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return decode(operand) if isinstance(operand, QuantizedTensor) else operand.double()

"""The truth for the quantization ops: float64, rounded once."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.quantization.reference_decode import decode
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["dequantize"]


def dequantize(
    tensor: QuantizedTensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.quantization.dequantize`."""
    values = decode(tensor).float()
    return values.to(out_dtype or torch.float32).contiguous() if out is None else out.copy_(values)

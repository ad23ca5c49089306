"""The truth for the quantization ops: float64, rounded where the contract says so."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.quantization.reference_decode import decode
from tokenspeed_kernel.ops.quantization.reference_encode import encode
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["dequantize", "quantize"]


def dequantize(
    tensor: QuantizedTensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.quantization.dequantize`."""
    values = decode(tensor).float()
    return values.to(out_dtype or torch.float32).contiguous() if out is None else out.copy_(values)


def quantize(
    x: torch.Tensor,
    format: Format,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """See `tokenspeed_kernel.ops.quantization.quantize`."""
    result = encode(x, format, scale, global_scale)
    if out is None:
        return result
    for mine, theirs in zip(out.parts, result.parts, strict=True):
        mine.copy_(theirs)
    return out

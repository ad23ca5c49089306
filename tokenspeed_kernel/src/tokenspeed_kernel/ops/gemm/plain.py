"""No packing: the weight as it is, multiplied by `mm`."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.gemm.api import mm
from tokenspeed_kernel.ops.gemm.packed import PackedWeight
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["pack_weight", "reference_pack_weight"]


def pack_weight(weight: torch.Tensor | QuantizedTensor) -> PackedWeight:
    """See `tokenspeed_kernel.ops.gemm.pack_weight`; the packed weight is the weight itself."""
    return PackedWeight(weight, weight.shape[0], weight.shape[1], _multiply, "plain", _dtypes(weight))


def reference_pack_weight(weight: torch.Tensor | QuantizedTensor) -> PackedWeight:
    """See `tokenspeed_kernel.ops.gemm.pack_weight`; multiplies in float64."""
    return PackedWeight(weight, weight.shape[0], weight.shape[1], _reference_multiply, "reference", _dtypes(weight))


def _dtypes(weight: torch.Tensor | QuantizedTensor) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, torch.float16) if isinstance(weight, QuantizedTensor) else (weight.dtype,)


def _multiply(
    x: torch.Tensor, data: torch.Tensor | QuantizedTensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    return mm(x, data, bias, out=out)


def _reference_multiply(
    x: torch.Tensor, data: torch.Tensor | QuantizedTensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    return mm(x, data, bias, out=out, solution="reference")

"""fp8 products of TensorRT-LLM: rows scaled by 1 x 128, weights by 128 x 128."""

from __future__ import annotations

import math
from typing import Final

import tensorrt_llm  # noqa: F401 - registers the operators
import torch

from tokenspeed_kernel.ops.gemm.vendor.block_fp8 import column_major_scales, padded, padded_weight
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm"]

_FEATURES_MULTIPLE: Final = 16
_SCALE_ROWS_MULTIPLE: Final = 4


def mm(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`; without a bias."""
    features = weight.shape[0]
    shape = (*x.shape[:-1], features)
    rows = math.prod(x.shape[:-1])
    if 0 in (rows, features, x.shape[-1]):
        return torch.zeros(shape, dtype=torch.bfloat16, device=x.device) if out is None else out.zero_()
    values, scales = padded(x)
    weights, weight_scales = padded_weight(weight, _FEATURES_MULTIPLE)
    row_scales = column_major_scales(scales.reshape(rows, -1), _SCALE_ROWS_MULTIPLE)
    left = values.reshape(rows, -1).contiguous()
    product: torch.Tensor = torch.ops.trtllm.fp8_block_scaling_gemm(left, weights, row_scales, weight_scales)
    result = product[:, :features].reshape(shape)
    return result if out is None else out.copy_(result)

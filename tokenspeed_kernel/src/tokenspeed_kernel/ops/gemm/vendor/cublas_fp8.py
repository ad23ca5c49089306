"""Product of two fp8 matrices by cuBLAS, as PyTorch calls it: one scale for each matrix, or one for each row of both."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm"]

# What the library asks of the depth and of the number of features, and with scales for each row of the number of rows: it takes
# one row or 64, and not 3.
_MULTIPLE = 16


def mm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`. Sizes that the library does not take are filled up with zeros."""
    assert isinstance(x, QuantizedTensor) and isinstance(weight, QuantizedTensor)
    assert x.scale is not None and weight.scale is not None
    out_features, in_features = weight.shape
    shape = (*x.shape[:-1], out_features)
    num_rows = math.prod(shape[:-1])
    if x.ndim != 2:
        # A scale for each row of the whole; for each matrix of the stack where they have one each.
        return _stack(x, weight, bias, out, out_dtype)
    if num_rows == 0 or out_features == 0 or in_features == 0:
        result = torch.zeros(shape, dtype=out_dtype, device=x.device)
        result = result if bias is None else result + bias
    else:
        result = _product(x, weight, bias, out_dtype)
    return result if out is None else out.copy_(result)


def _product(
    x: QuantizedTensor, weight: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    assert x.scale is not None and weight.scale is not None
    num_rows, out_features = x.shape[0], weight.shape[0]
    left, right = x.scale.float(), weight.scale.float()
    more_rows = -num_rows % _MULTIPLE if left.dim() == 2 else 0
    rows, features = _filled(x.data, more_rows), _filled(weight.data, -out_features % _MULTIPLE)
    missing = features.shape[0] - out_features
    if left.dim() == 2:
        right = pad(right, (0, 0, 0, missing), value=1.0).t().contiguous()
        left = pad(left, (0, 0, 0, more_rows), value=1.0).contiguous()
    if bias is not None and missing:
        bias = pad(bias, (0, missing))
    scaled_mm = torch._scaled_mm
    result: torch.Tensor = scaled_mm(rows, features.t(), left, right, bias, out_dtype=out_dtype)
    return result[:num_rows, :out_features].contiguous() if missing or more_rows else result


def _filled(data: torch.Tensor, rows: int) -> torch.Tensor:
    """Row after row, with zeros up to a depth that the library takes, and that many rows of zeros more."""
    columns = -data.shape[1] % _MULTIPLE
    if not rows and not columns:
        return data.contiguous()
    return pad(data.view(torch.uint8), (0, columns, 0, rows)).view(data.dtype)


def _stack(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)
    for index in range(x.shape[0]):
        mm(x[index], weight, bias, out=out[index], out_dtype=out_dtype)
    return out

"""The truth for the products of stacks of matrices: float64, rounded once."""

from __future__ import annotations

import itertools

import torch

from tokenspeed_kernel.ops.quantization.reference_decode import decode
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["bmm", "grouped_mm_contiguous", "grouped_mm_masked"]


def bmm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.bmm`."""
    return _given(torch.matmul(_exact(x), _exact(weight).transpose(-1, -2)), out, out_dtype)


def grouped_mm_contiguous(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    offsets: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_contiguous`."""
    rows, weights = _exact(x), _exact(weight)
    num_rows, num_experts = rows.shape[0], weights.shape[0]
    if expert_ids is not None:
        owners = expert_ids.tolist()
    else:
        assert offsets is not None
        bounds = offsets.tolist()
        owners = [-1] * num_rows
        for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
            for row in range(max(first, 0), min(last, num_rows)):
                owners[row] = expert
    result = rows.new_zeros((num_rows, weights.shape[1]))
    for row, expert in enumerate(owners):
        if 0 <= expert < num_experts:
            result[row] = weights[expert] @ rows[row]
    return _given(result, out, out_dtype)


def grouped_mm_masked(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    masked_m: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_masked`."""
    rows, weights = _exact(x), _exact(weight)
    result = rows.new_zeros((*rows.shape[:2], weights.shape[1]))
    for expert, count in enumerate(masked_m.tolist()):
        result[expert, : max(count, 0)] = rows[expert, : max(count, 0)] @ weights[expert].t()
    return _given(result, out, out_dtype)


def _exact(operand: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return decode(operand) if isinstance(operand, QuantizedTensor) else operand.double()


def _given(result: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.Tensor:
    if out is not None:
        return out.copy_(result)
    assert out_dtype is not None
    return result.to(out_dtype).contiguous()

"""Products of stacks of matrices on the CPU: one product for each matrix that has rows."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.gemm.cpu.mm import exact_product
from tokenspeed_kernel.ops.gemm.cpu.mm_scaled import product_scaled
from tokenspeed_kernel.ops.quantization.cpu.decode import decode
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
    if out is None:
        out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=out_dtype, device=x.device)
    for index in range(x.shape[0]):
        out[index].copy_(_product(x[index], weight[index]))
    return out


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
    num_rows, num_experts = x.shape[0], weight.shape[0]
    if out is None:
        out = torch.empty((num_rows, weight.shape[1]), dtype=out_dtype, device=x.device)
    if expert_ids is not None:
        owned = 0
        for expert, first, last in _runs(expert_ids, num_experts):
            out[owned:first].zero_()
            out[first:last].copy_(_product(_rows(x, first, last), weight[expert]))
            owned = last
    else:
        assert offsets is not None
        bounds = [min(max(bound, 0), num_rows) for bound in offsets.tolist()]
        owned = bounds[0]
        out[:owned].zero_()
        for expert, last in enumerate(bounds[1:]):
            if last > owned:
                out[owned:last].copy_(_product(_rows(x, owned, last), weight[expert]))
                owned = last
    out[owned:].zero_()
    return out


def grouped_mm_masked(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    masked_m: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_masked`."""
    if out is None:
        out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=out_dtype, device=x.device)
    for expert, count in enumerate(masked_m.tolist()):
        count = min(max(count, 0), x.shape[1])
        if count:
            out[expert, :count].copy_(_product(_rows(x[expert], 0, count), weight[expert]))
        out[expert, count:].zero_()
    return out


def _runs(expert_ids: torch.Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """(expert, first row, row after the last) of each run of equal ids that name an expert."""
    values, counts = torch.unique_consecutive(expert_ids, return_counts=True)
    runs, first = [], 0
    for expert, count in zip(values.tolist(), counts.tolist(), strict=True):
        if 0 <= expert < num_experts:
            runs.append((expert, first, first + count))
        first += count
    return runs


def _rows(x: torch.Tensor | QuantizedTensor, first: int, last: int) -> torch.Tensor | QuantizedTensor:
    return x.rows(first, last) if isinstance(x, QuantizedTensor) else x[first:last]


def _product(x: torch.Tensor | QuantizedTensor, weight: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """x @ weight.T in float32."""
    rows = decode(x) if isinstance(x, QuantizedTensor) else x
    return product_scaled(rows.float(), weight) if isinstance(weight, QuantizedTensor) else exact_product(rows, weight)

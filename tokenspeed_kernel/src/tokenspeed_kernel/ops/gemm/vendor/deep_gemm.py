"""fp8 products of DeepGEMM: rows scaled by 1 x 128, weights by 128 x 128.

Its grouped product wants the rows of an expert to start at a multiple of its tile: they are brought there and back, without the
host knowing how many there are.
"""

from __future__ import annotations

import math
from typing import Final

import deep_gemm
import torch
from torch.nn.functional import pad

from tokenspeed_kernel.ops.gemm.vendor.block_fp8 import padded, padded_weight
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["grouped_mm_contiguous", "grouped_mm_masked", "mm"]

_FEATURES_MULTIPLE: Final = 64
# Rows that one tile of the grouped product has, where the library does not tell.
_ROWS_ALIGNMENT: Final = 128


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
        return _zeros(shape, x.device, out)
    values, scales = padded(x)
    weights, weight_scales = padded_weight(weight, _FEATURES_MULTIPLE)
    width = weights.shape[0]
    direct = out is not None and out.is_contiguous() and width == features
    target = (
        out.view(rows, width)
        if out is not None and direct
        else torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    )
    left = values.reshape(rows, -1).contiguous(), scales.reshape(rows, -1).contiguous()
    deep_gemm.fp8_gemm_nt(left, (weights, weight_scales), target)
    if out is not None and direct:
        return out
    result = target[:, :features].reshape(shape)
    return result if out is None else out.copy_(result)


def grouped_mm_contiguous(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    offsets: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_contiguous`."""
    num_rows, features = x.shape[0], weight.shape[1]
    num_experts = weight.shape[0]
    if 0 in (num_rows, features, num_experts, x.shape[1]):
        return _zeros((num_rows, features), x.device, out)
    experts = _expert_of_row(num_rows, num_experts, offsets, expert_ids, x.device)
    alignment = _alignment()
    place, room = _aligned_places(experts, num_experts, num_rows, alignment)
    values, scales = padded(x)
    weights, weight_scales = padded_weight(weight, _FEATURES_MULTIPLE)
    # The last row is a bin for rows of nobody.
    spread = torch.zeros(room + 1, values.shape[1], dtype=torch.uint8, device=x.device)
    spread[place] = values.view(torch.uint8)
    spread_scales = torch.zeros(room + 1, scales.shape[1], dtype=torch.float32, device=x.device)
    spread_scales[place] = scales
    owners = torch.full((room + 1,), -1, dtype=torch.int32, device=x.device)
    owners[place] = experts.to(torch.int32)
    product = torch.empty(room, weights.shape[1], dtype=torch.bfloat16, device=x.device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (spread[:room].view(values.dtype), spread_scales[:room]), (weights, weight_scales), product, owners[:room]
    )
    result = product[place.clamp(max=room - 1), :features]
    result = result.masked_fill_((experts < 0).unsqueeze(1), 0)
    return result if out is None else out.copy_(result)


def grouped_mm_masked(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    masked_m: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.grouped_mm_masked`."""
    num_experts, max_m, in_features = x.shape
    features = weight.shape[1]
    if 0 in (num_experts, max_m, features, in_features):
        return _zeros((num_experts, max_m, features), x.device, out)
    values, scales = padded(x)
    weights, weight_scales = padded_weight(weight, _FEATURES_MULTIPLE)
    counts = masked_m.clamp(0, max_m).to(torch.int32)
    # A tile is stored whole: where an expert's rows are no multiple of it, it would run into those of the next one.
    more_rows = -max_m % _ROWS_ALIGNMENT
    room = max_m + more_rows
    product = torch.empty(num_experts, room, weights.shape[1], dtype=torch.bfloat16, device=x.device)
    values = pad(values.view(torch.uint8), (0, 0, 0, more_rows)).view(values.dtype)
    left = values.contiguous(), pad(scales, (0, 0, 0, more_rows)).contiguous()
    # The last argument is how many rows to expect; the host does not know, and the bound serves the case that takes longest.
    deep_gemm.m_grouped_fp8_gemm_nt_masked(left, (weights, weight_scales), product, counts, max_m)
    behind = torch.arange(max_m, device=x.device) >= counts.unsqueeze(1)
    result = product[:, :max_m, :features].masked_fill(behind.unsqueeze(2), 0)
    return result if out is None else out.copy_(result)


def _zeros(shape: tuple[int, ...], device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device) if out is None else out.zero_()


def _alignment() -> int:
    ask = getattr(deep_gemm, "get_mk_alignment_for_contiguous_layout", None)
    return int(ask()) if ask is not None else _ROWS_ALIGNMENT


def _expert_of_row(
    num_rows: int, num_experts: int, offsets: torch.Tensor | None, expert_ids: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """[num_rows] int64: each row's expert, -1 for a row of nobody."""
    if expert_ids is not None:
        experts = expert_ids.long()
        return torch.where((experts >= 0) & (experts < num_experts), experts, -1)
    assert offsets is not None
    rows = torch.arange(num_rows, device=device)
    ends = offsets[1:].long().contiguous()
    experts = torch.searchsorted(ends, rows, right=True)
    return torch.where((experts < num_experts) & (rows >= offsets[0]), experts, -1)


def _aligned_places(
    experts: torch.Tensor, num_experts: int, num_rows: int, alignment: int
) -> tuple[torch.Tensor, int]:
    """Where each row goes so that an expert starts at a multiple of the tile; rows of nobody go to the returned number of rows."""
    room = (num_rows + num_experts * (alignment - 1) + alignment - 1) // alignment * alignment
    bins = torch.where(experts < 0, num_experts, experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device).index_add_(0, bins, torch.ones_like(bins))
    aligned = (counts + alignment - 1) // alignment * alignment
    starts = torch.cumsum(aligned, 0) - aligned
    order = torch.argsort(bins, stable=True)
    first = torch.cumsum(counts, 0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(num_rows, device=experts.device) - first[bins[order]]
    return torch.where(experts < 0, room, starts[bins] + rank), room

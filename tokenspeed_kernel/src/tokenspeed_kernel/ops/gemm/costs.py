"""Least work of the matrix products: two operations for each product and sum."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost

__all__ = ["COSTS"]


def _mm_flops(inputs: dict[str, Any]) -> int:
    x, weight = inputs["x"], inputs["weight"]
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return int(2 * rows * weight.shape[-2] * weight.shape[-1])


def _bmm_flops(inputs: dict[str, Any]) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return int(2 * x.shape[0] * x.shape[-2] * weight.shape[-2] * weight.shape[-1])


def _contiguous_flops(inputs: dict[str, Any]) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return int(2 * x.shape[0] * weight.shape[-2] * weight.shape[-1])


def _masked_flops(inputs: dict[str, Any]) -> int:
    """The rows behind an expert's count are not multiplied."""
    weight = inputs["weight"]
    return int(2 * int(inputs["masked_m"].clamp(min=0).sum()) * weight.shape[-2] * weight.shape[-1])


COSTS: Final = {
    "gemm.mm": Cost(flops=_mm_flops),
    "gemm.bmm": Cost(flops=_bmm_flops),
    "gemm.grouped_mm_contiguous": Cost(flops=_contiguous_flops),
    "gemm.grouped_mm_masked": Cost(flops=_masked_flops),
    "gemm.pack_weight": Cost(),
}
"""By op."""

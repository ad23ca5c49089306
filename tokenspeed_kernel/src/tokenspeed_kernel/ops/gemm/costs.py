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


COSTS: Final = {"gemm.mm": Cost(flops=_mm_flops), "gemm.bmm": Cost(flops=_bmm_flops)}
"""By op."""

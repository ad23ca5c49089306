"""Least work of conversions to and from scaled formats: operands are read and results written once."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.case import Cost

__all__ = ["COSTS"]

_OPS: Final = (
    "quantization.quantize",
    "quantization.dequantize",
)
# Bandwidth alone is the limit.
COSTS: Final = {op: Cost() for op in _OPS}
"""By op."""

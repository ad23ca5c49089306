"""Least work of the norms: operands are read and results written once."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.case import Cost

__all__ = ["COSTS"]

_OPS: Final = (
    "norm.rms_norm",
    "norm.fused_add_rms_norm",
    "norm.gemma_rms_norm",
    "norm.fused_add_gemma_rms_norm",
    "norm.gated_rms_norm",
    "norm.layer_norm",
)
# Bandwidth alone is the limit.
COSTS: Final = {op: Cost() for op in _OPS}
"""By op."""

"""Least work of the gated activations: operands are read and results written once."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.case import Cost

__all__ = ["COSTS"]

_OPS: Final = (
    "activation.gelu_and_mul",
    "activation.silu_and_mul",
    "activation.swiglu_clamped",
)
# Bandwidth alone is the limit.
COSTS: Final = {op: Cost() for op in _OPS}
"""By op."""

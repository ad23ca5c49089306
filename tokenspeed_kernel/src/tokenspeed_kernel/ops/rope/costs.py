"""Least work of the rotary embedding: of the table, only the rows of the positions are read."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.rope.contract import APPLY_ROPE, MULTI_AXIS_COS_SIN

__all__ = ["COSTS"]


def _bytes(*tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _apply_bytes(inputs: dict[str, Any], result: Any) -> int:
    positions, table = inputs["positions"], inputs["cos_sin_cache"]
    rows = positions.numel() * table.shape[-1] * table.element_size()
    return int(rows + _bytes(inputs["q"], inputs["k"], positions, *result))


def _axes_bytes(inputs: dict[str, Any], result: Any) -> int:
    # Each pair of the result is read from the row of one axis.
    return int(_bytes(inputs["positions"], result) + _bytes(result))


COSTS: Final = {APPLY_ROPE.name: Cost(_apply_bytes), MULTI_AXIS_COS_SIN.name: Cost(_axes_bytes)}
"""By op."""

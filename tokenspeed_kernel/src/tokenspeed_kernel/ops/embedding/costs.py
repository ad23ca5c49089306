"""Least work of the embedding: of the table, only the rows asked for are read."""

from __future__ import annotations

from typing import Any, Final

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING

__all__ = ["COSTS"]


def _moved_bytes(inputs: dict[str, Any], result: Any) -> int:
    ids, weight = inputs["token_ids"], inputs["weight"]
    rows, hidden = weight.shape
    stored = getattr(weight, "size_bytes", None)  # of a quantized table
    row_bytes = hidden * weight.element_size() if stored is None else stored / max(rows, 1)
    return int(ids.numel() * (ids.element_size() + row_bytes) + result.numel() * result.element_size())


COSTS: Final = {EMBEDDING.name: Cost(_moved_bytes)}
"""By op."""

"""Masks of causal tiles, shared by every tile, request, layer and step.

Seen from its last key, what a causal tile hides does not depend on where the tile lies: query i of n sees the key that is c columns
before the last one if c >= n - 1 - i, and with a window of W if also c < n - 1 - i + W. One table, wide enough for the
longest request, therefore holds every tile's mask as a slice of its lower right corner.
"""

from __future__ import annotations

import math

import torch

__all__ = ["tile_mask"]

_MAX_BYTES = 64 << 20
_tables: dict[tuple[int, int | None], torch.Tensor] = {}


def tile_mask(num_rows: int, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor | None:
    """Mask [num_queries, num_keys] fp32 of a tile of at most ``num_rows`` queries; None where the table would be too large."""
    table = _tables.get((num_rows, window))
    if table is None or table.shape[1] < num_keys:
        width = max(1024, 1 << (num_keys - 1).bit_length())
        if num_rows * width * 4 > _MAX_BYTES:
            return None
        before_last = torch.arange(width - 1, -1, -1)
        hidden_after = torch.arange(num_rows - 1, -1, -1)[:, None]
        hidden = before_last < hidden_after
        if window is not None:
            hidden |= before_last >= hidden_after + window
        # Replaced as a whole: a thread that still reads the narrower table keeps it alive.
        table = _tables[(num_rows, window)] = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return table[num_rows - num_queries :, table.shape[1] - num_keys :]

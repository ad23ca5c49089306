"""Choice of the best scores on the CPU, by a stable sort."""

from __future__ import annotations

import math

import torch

__all__ = ["topk_slots"]


def topk_slots(
    scores: torch.Tensor,
    k: int,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the k best scores of each row, and give their slots; see the public op for the contract."""
    num_tokens, num_keys = scores.shape
    if out is None:
        out = torch.empty((num_tokens, k), dtype=torch.int32)
    out.fill_(-1)
    taken = min(k, num_keys)
    if taken == 0 or num_tokens == 0:
        return out
    values = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    order = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :taken]
    # What is not to be chosen goes behind every position.
    chosen = torch.where(values.gather(1, order) > -math.inf, order, num_keys).sort(dim=1).values
    if page_table is None or cu_seqlens_q is None:
        out[:, :taken] = torch.where(chosen < num_keys, chosen, -1)
        return out
    rows = torch.searchsorted(cu_seqlens_q[1:].contiguous(), torch.arange(num_tokens, dtype=torch.int32), right=True)
    positions = chosen.clamp(max=num_keys - 1)
    columns = torch.div(positions, page_size, rounding_mode="floor")
    pages = page_table.long()[rows[:, None], columns]
    slots = pages * page_size + positions - columns * page_size
    out[:, :taken] = torch.where((chosen < num_keys) & (pages >= 0) & (slots < 2**31), slots, -1)
    return out

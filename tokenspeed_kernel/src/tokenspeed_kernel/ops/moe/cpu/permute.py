"""Tokens sorted by expert, and back, on the CPU."""

from __future__ import annotations

import torch

__all__ = ["permute", "sort_pairs", "unpermute"]

_BLOCK_TOKENS = 64
"""Tokens summed at a time: their float32 sums stay in the cache."""


def sort_pairs(topk_ids: torch.Tensor, num_experts: int, first_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (pair of each row, offsets [num_experts + 1]), both int64; dropped pairs are left out."""
    local = topk_ids.reshape(-1).long() - first_expert
    # Dropped pairs sort behind all others.
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    ordered, pairs = local.sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_experts + 1))
    return pairs[: int(offsets[-1])], offsets


def permute(
    x: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, first_expert: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.moe.permute`."""
    pairs, offsets = sort_pairs(topk_ids, num_experts, first_expert)
    used = pairs.shape[0]
    rows = x.new_empty((topk_ids.numel(), x.shape[1]))
    if used:
        torch.index_select(x, 0, pairs // topk_ids.shape[1], out=rows[:used])
    rows[used:] = 0
    row_of_pair = torch.full((topk_ids.numel(),), -1, dtype=torch.int32)
    row_of_pair[pairs] = torch.arange(used, dtype=torch.int32)
    return rows, offsets.int(), row_of_pair.view(topk_ids.shape)


def unpermute(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.moe.unpermute`."""
    num_tokens, top_k = row_of_pair.shape
    if out is None:
        out = rows.new_empty((num_tokens, rows.shape[1]))
    for start in range(0, num_tokens, _BLOCK_TOKENS):
        block = slice(start, start + _BLOCK_TOKENS)
        named = row_of_pair[block].long()
        valid = (named >= 0) & (named < rows.shape[0])
        total = torch.zeros((named.shape[0], rows.shape[1])) if addend is None else addend[block].float()
        total = total.clone() if total.data_ptr() == out[block].data_ptr() else total
        for slot in range(top_k):
            # By index, not by a mask of zeros: an unused row may be NaN.
            token = valid[:, slot].nonzero()[:, 0]
            part = rows[named[token, slot]].float() * topk_weights[block][token, slot, None]
            total = total.index_add(0, token, part)
        out[block] = total.to(out.dtype)
    return out

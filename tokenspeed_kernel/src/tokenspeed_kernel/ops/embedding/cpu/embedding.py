"""Embedding look-up on the CPU."""

from __future__ import annotations

import torch

__all__ = ["embedding"]


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`."""
    if weight.shape[0] == 0:
        rows = weight.new_zeros((token_ids.shape[0], weight.shape[1]))
        return rows if out is None else out.copy_(rows)
    try:
        rows = weight.index_select(0, token_ids)
    except IndexError:
        # The look-up checks every id and refuses those outside the table. Nearly every call has none, so that looking for
        # them beforehand would only cost: 6 us of the 9 that one token took.
        rows = _partly_outside(token_ids, weight)
    return rows.contiguous() if out is None else out.copy_(rows)


def _partly_outside(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outside = (token_ids < 0) | (token_ids >= weight.shape[0])
    rows = weight.index_select(0, token_ids.masked_fill(outside, 0))
    return rows.masked_fill_(outside.unsqueeze(-1), 0)

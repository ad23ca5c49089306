"""Embedding look-up on the CPU."""

from __future__ import annotations

import torch

__all__ = ["embedding"]


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`."""
    vocab = weight.shape[0]
    if token_ids.shape[0] == 0 or vocab == 0:
        shape = (token_ids.shape[0], weight.shape[1])
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device) if out is None else out.zero_()
    # The look-up refuses ids outside the table; nearly every call has none, and finding that out costs one pass over ids.
    low, high = token_ids.aminmax()
    if low >= 0 and high < vocab:
        rows = weight.index_select(0, token_ids)
    else:
        outside = (token_ids < 0) | (token_ids >= vocab)
        rows = weight.index_select(0, token_ids.masked_fill(outside, 0))
        rows.masked_fill_(outside.unsqueeze(-1), 0)
    return rows.contiguous() if out is None else out.copy_(rows)

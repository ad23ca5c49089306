"""The truth for the embedding ops."""

from __future__ import annotations

import torch

__all__ = ["embedding"]


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`."""
    vocab, hidden = weight.shape
    result = torch.zeros((token_ids.shape[0], hidden), dtype=weight.dtype, device=weight.device)
    for row, token in enumerate(token_ids.tolist()):
        if 0 <= token < vocab:
            result[row] = weight[token]
    return result if out is None else out.copy_(result)

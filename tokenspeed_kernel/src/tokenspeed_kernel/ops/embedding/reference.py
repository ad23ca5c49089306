"""The truth for the embedding ops."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.quantization.reference_decode import decode
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["embedding"]


def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor | QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`."""
    vocab, hidden = weight.shape
    table = decode(weight).float() if isinstance(weight, QuantizedTensor) else weight
    result = torch.zeros((token_ids.shape[0], hidden), dtype=out_dtype, device=weight.device)
    for row, token in enumerate(token_ids.tolist()):
        if 0 <= token < vocab:
            result[row] = table[token]
    return result if out is None else out.copy_(result)

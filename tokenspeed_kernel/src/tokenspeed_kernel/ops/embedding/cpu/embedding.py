"""Embedding look-up on the CPU."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.quantization.cpu.decode import decode
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["embedding", "embedding_scaled"]


def embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
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


def embedding_scaled(
    token_ids: torch.Tensor, weight: QuantizedTensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.embedding.embedding`; the rows that are asked for are decoded, no others."""
    vocab, hidden = weight.shape
    num_tokens = token_ids.shape[0]
    if out is None:
        out = torch.empty((num_tokens, hidden), dtype=out_dtype, device=weight.device)
    if vocab == 0 or num_tokens == 0:
        return out.zero_()
    outside = (token_ids < 0) | (token_ids >= vocab)
    rows = token_ids.masked_fill(outside, 0)
    return out.copy_(decode(_gathered(weight, rows)).masked_fill_(outside.unsqueeze(-1), 0))


def _gathered(weight: QuantizedTensor, rows: torch.Tensor) -> QuantizedTensor:
    """The given rows as a tensor of their own."""
    fmt, scale, zero_point = weight.format, weight.scale, weight.zero_point
    if scale is not None and fmt.scale == "block_128x128":
        # Rows that were neighbours share a scale no longer.
        fmt, scale = Format.parse(f"{fmt.logical}@block_1x128"), _select(scale, rows // 128)
    elif scale is not None and fmt.scale != "tensor":
        scale = _select(scale, rows)
    zero_point = None if zero_point is None else _select(zero_point, rows)
    shape = (rows.shape[0], weight.shape[1])
    return QuantizedTensor(_select(weight.data, rows), fmt, shape, scale, weight.global_scale, zero_point)


def _select(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor; PyTorch gathers none of float8, but of bytes it does."""
    if tensor.element_size() > 1:
        return tensor.index_select(0, rows)
    return tensor.view(torch.uint8).index_select(0, rows).view(tensor.dtype)


def _partly_outside(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outside = (token_ids < 0) | (token_ids >= weight.shape[0])
    rows = weight.index_select(0, token_ids.masked_fill(outside, 0))
    return rows.masked_fill_(outside.unsqueeze(-1), 0)

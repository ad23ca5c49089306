"""Rows of a GGUF embedding table; see `tokenspeed_kernel.ops.embedding` for the contract."""

from __future__ import annotations

import torch

from tokenspeed_kernel import QuantizedTensor
from tokenspeed_kernel_cpu import _kernels
from tokenspeed_kernel_cpu.formats import STORED

__all__ = ["embedding"]


def embedding(
    token_ids: torch.Tensor,
    weight: QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Dequantize the row of each token out of its blocks."""
    vocab, hidden = weight.shape
    tokens = token_ids.shape[0]
    target = out
    if target is None or not target.is_contiguous():
        target = torch.empty((tokens, hidden), dtype=out_dtype, device="cpu")
    data = weight.data
    _kernels.embedding(
        STORED[weight.format.logical], data.data_ptr(), data.stride(0), vocab, hidden, token_ids.data_ptr(),
        token_ids.dtype is torch.int64, token_ids.stride(0), tokens, target.data_ptr(), hidden, out_dtype is torch.bfloat16,
    )  # fmt: skip
    return target if out is None or out is target else out.copy_(target)

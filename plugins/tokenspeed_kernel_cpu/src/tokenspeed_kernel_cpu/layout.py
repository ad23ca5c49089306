"""How the rows of a tensor lie in memory."""

from __future__ import annotations

import torch


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """Describe a tensor's rows (its last dimension) by two strides.

    Args:
        x: fp32 of at least one dimension.
    Returns:
        (tensor, rows, inner, outer_stride, inner_stride): row i starts at
        ``(i // inner) * outer_stride + (i % inner) * inner_stride`` elements. The tensor is x where two strides and neighbouring
        elements describe it, else a contiguous copy, which the caller must keep.
    """
    shape = x.shape
    if not x.is_contiguous():
        strides, num_dims = x.stride(), len(shape)
        if strides[-1] == 1:
            if num_dims == 2:
                return x, shape[0], 1, strides[0], 0
            if num_dims == 3:
                return x, shape[0] * shape[1], shape[1] or 1, strides[0], strides[1]
        x = x.contiguous()
    columns = shape[-1]
    rows = shape[0] if len(shape) == 2 else x.numel() // columns if columns else 0
    return x, rows, 1, columns, 0

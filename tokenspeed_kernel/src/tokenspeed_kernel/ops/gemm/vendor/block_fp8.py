"""fp8 operands with block scales as vendor libraries want them: sizes that are multiples of a tile, scales in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["BLOCK", "column_major_scales", "padded", "padded_weight"]

BLOCK = 128
"""Elements of a row that share a scale, and rows of a weight that do."""


def padded(x: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [..., rows, in_features] and float32 scales [..., rows, blocks]; zeros fill in_features up to a multiple of 128.

    Args:
        x: fp8_e4m3@block_1x128.
    """
    assert x.scale is not None
    rest = -x.shape[-1] % BLOCK
    return _zeros_behind(x.data, rest, 0), x.scale.float()


def padded_weight(weight: QuantizedTensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a weight whose rows are filled up to a multiple as well.

    Args:
        weight: fp8_e4m3@block_128x128, a matrix or a stack.
        multiple: of which out_features must be one; it divides 128, so that the scales stay as they are.
    """
    assert weight.scale is not None
    data = _zeros_behind(weight.data, -weight.shape[-1] % BLOCK, -weight.shape[-2] % multiple)
    return data.contiguous(), weight.scale.float().contiguous()


def column_major_scales(scale: torch.Tensor, rows_multiple: int) -> torch.Tensor:
    """[rows, blocks] as [blocks, rows], the rows of one block behind each other and filled up to a multiple."""
    rows, blocks = scale.shape
    turned = scale.new_zeros(blocks, rows + -rows % rows_multiple)
    turned[:, :rows] = scale.T
    return turned


def _zeros_behind(data: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
    if not columns and not rows:
        return data
    # Bytes: fp8 has no padding of its own, and a zero byte is a zero.
    filled = functional.pad(data.view(torch.uint8), (0, columns, 0, rows))
    return filled.view(data.dtype)

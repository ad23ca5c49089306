"""Block formats of GGUF tensors, to float32.

Each format is a row of blocks; a block is a few scales and packed integers. A function takes the raw bytes of whole blocks,
[num_blocks, block_bytes] uint8, and returns [num_blocks, block_elements] float32.

Source: the GGUF block layouts (ggml-common.h); checked bit for bit against the `gguf` package in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are converted in pieces, so that the temporaries stay in the cache instead of streaming through memory several times.
_PIECE_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """How elements of one GGUF tensor type are stored.

    Attributes:
        name: GGML's name.
        block_elements: elements of one block; rows are whole blocks.
        block_bytes: bytes of one block.
        dtype: dtype of an unquantized format, else None.
        decode: blocks to float32, for a quantized one.
    """

    name: str
    block_elements: int
    block_bytes: int
    dtype: torch.dtype | None = None
    decode: Callable[[Tensor], Tensor] | None = None


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte offset of each block, as [num_blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, bytes] -> [n, 2 * bytes] float32: all low nibbles, then all high ones."""
    return torch.cat((packed & 0xF, packed >> 4), dim=1).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_k(blocks: Tensor) -> Tensor:
    # 8 sub-blocks of 32; 6-bit scales and minima are spread over 12 bytes.
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 0xF) | ((first >> 6) << 4)), dim=1).float()
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1).float()
    scales, minima = scales.mul_(_half(blocks, 0)), minima.mul_(_half(blocks, 2))
    quants = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = torch.cat((quants & 0xF, quants >> 4), dim=2).reshape(-1, 8, 32).float()
    return values.mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2)).reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    # Two halves of 128: 4 low bits in 64 bytes, 2 high bits in 32 bytes, 8 signed scales of 16 elements each.
    low = blocks[:, 0:128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    bits_low = torch.cat((low & 0xF, low >> 4), dim=2)
    bits_high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    values = (bits_low | (bits_high << 4)).float().sub_(32.0)
    return values.reshape(-1, 16, 16).mul_(scales.unsqueeze(2)).reshape(-1, 256)


FORMATS: dict[int, TensorFormat] = {
    0: TensorFormat("F32", 1, 4, dtype=torch.float32),
    1: TensorFormat("F16", 1, 2, dtype=torch.float16),
    2: TensorFormat("Q4_0", 32, 18, decode=_q4_0),
    3: TensorFormat("Q4_1", 32, 20, decode=_q4_1),
    8: TensorFormat("Q8_0", 32, 34, decode=_q8_0),
    12: TensorFormat("Q4_K", 256, 144, decode=_q4_k),
    14: TensorFormat("Q6_K", 256, 210, decode=_q6_k),
    30: TensorFormat("BF16", 1, 2, dtype=torch.bfloat16),
}
"""GGML type number to format: the ones that can be read."""


def dequantize(raw: Tensor, tensor_format: TensorFormat) -> Tensor:
    """Turn the bytes of a tensor into its elements.

    Args:
        raw: [num_bytes] uint8, whole blocks of `tensor_format`.
        tensor_format: an entry of FORMATS.
    Returns:
        [num_elements]: float32 for quantized formats, a copy in the stored dtype for the others.
    Raises:
        ValueError: the bytes are not whole blocks.
    Source: the GGUF block layouts.
    """
    if raw.numel() % tensor_format.block_bytes:
        raise ValueError(
            f"dequantize: expected whole {tensor_format.name} blocks of {tensor_format.block_bytes} bytes, got {raw.numel()} bytes"
        )
    if tensor_format.decode is None:
        assert tensor_format.dtype is not None
        return raw.clone().view(tensor_format.dtype)
    blocks = raw.view(-1, tensor_format.block_bytes)
    out = torch.empty(blocks.shape[0], tensor_format.block_elements, dtype=torch.float32)
    step = max(1, _PIECE_ELEMENTS // tensor_format.block_elements)
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = tensor_format.decode(blocks[start : start + step])
    return out.view(-1)

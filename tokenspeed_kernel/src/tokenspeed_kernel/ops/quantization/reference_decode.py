"""What the bytes of each scaled format stand for: float64, written for reading."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.quantization.codes import CODE_VALUES
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import GGUF_BLOCKS

__all__ = ["decode"]


def decode(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the numbers that a quantized tensor stands for.

    Args:
        tensor: in any scaled format.
    Returns:
        float64, of the logical shape, before any rounding.
    """
    if tensor.format.logical in GGUF_BLOCKS:
        return _gguf(tensor)
    values = _stored_values(tensor)
    if tensor.zero_point is not None:
        values = values - _spread(tensor, tensor.zero_point.double())
    if tensor.scale is not None:
        values = values * _spread(tensor, _scale_values(tensor.scale, tensor.format.logical))
    if tensor.global_scale is not None:
        values = values * tensor.global_scale.double()[..., None, None]
    return values


def _stored_values(tensor: QuantizedTensor) -> torch.Tensor:
    data, logical = tensor.data, tensor.format.logical
    if data.dtype is not torch.uint8:
        return data.double()
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).long()  # the lower half of a byte comes first
    return torch.tensor(CODE_VALUES[logical], dtype=torch.float64, device=data.device)[codes]


def _scale_values(scale: torch.Tensor, logical: str) -> torch.Tensor:
    if scale.dtype is not torch.uint8:
        return scale.double()
    powers = torch.exp2(scale.double() - 127)
    return powers.masked_fill(scale == 255, float("nan"))


def _spread(tensor: QuantizedTensor, per_block: torch.Tensor) -> torch.Tensor:
    """One number for each element, from one for each block."""
    if tensor.format.scale == "tensor":
        return per_block[..., None, None].expand(tensor.shape)
    rows, columns = tensor.format.block
    per_block = per_block.repeat_interleave(max(rows, 1), dim=-2)[..., : tensor.shape[-2], :]
    return per_block.repeat_interleave(columns or max(tensor.shape[-1], 1), dim=-1)[..., : tensor.shape[-1]]


def _half(pair: torch.Tensor) -> torch.Tensor:
    """Two bytes of each block as the float16 that they are."""
    return pair.contiguous().view(torch.float16).double()


def _gguf(tensor: QuantizedTensor) -> torch.Tensor:
    """Blocks of GGUF; the layouts are those of ggml's `block_q4_0`, `block_q4_1`, `block_q8_0`, `block_q4_K` and `block_q6_K`."""
    elements, num_bytes = GGUF_BLOCKS[tensor.format.logical]
    blocks = tensor.data.reshape(*tensor.shape[:-1], tensor.shape[-1] // elements, num_bytes)
    functions = {"gguf_q4_0": _q4_0, "gguf_q4_1": _q4_1, "gguf_q8_0": _q8_0, "gguf_q4_k": _q4_k, "gguf_q6_k": _q6_k}
    return functions[tensor.format.logical](blocks).reshape(tensor.shape)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), dim=-1).double()
    return _half(blocks[..., :2]) * (codes - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = torch.cat((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), dim=-1).double()
    return _half(blocks[..., :2]) * codes + _half(blocks[..., 2:4])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8).double()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Eight parts of 32 with a scale and a minimum of 6 bits each. The first four lie in the lower 6 bits of bytes 4..7 and
    8..11; the last four in the halves of bytes 12..15 (scale below, minimum above) and the upper 2 bits of the former."""
    low, high, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), dim=-1).double()
    minima = torch.cat((high & 63, mixed >> 4 | high >> 6 << 4), dim=-1).double()
    packed = blocks[..., 16:].view(*blocks.shape[:-1], 4, 32)  # parts 2 i and 2 i + 1 share 32 bytes
    codes = torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-3, -2).double()
    scales, minima = scales * _half(blocks[..., :2]), minima * _half(blocks[..., 2:4])
    return (scales[..., None] * codes - minima[..., None]).flatten(-2)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Two halves of 128, each of four quarters of 32: lower 4 bits from 64 bytes, upper 2 bits from 32; a scale for 16."""
    low = blocks[..., :128].view(*blocks.shape[:-1], 2, 2, 32)
    high = blocks[..., 128:192].view(*blocks.shape[:-1], 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=-2)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
    codes = (low | high << 4).double() - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).double() * _half(blocks[..., 208:])
    return codes.flatten(-3) * scales.repeat_interleave(16, dim=-1)

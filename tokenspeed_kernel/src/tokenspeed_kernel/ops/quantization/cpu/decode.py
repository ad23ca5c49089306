"""Scaled formats to float32 on the CPU, in few passes over memory."""

from __future__ import annotations

import functools
import math

import torch

from tokenspeed_kernel.ops.quantization.codes import CODE_VALUES
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import GGUF_BLOCKS

__all__ = ["decode", "dequantize"]

# Float32 bytes of the rows that are decoded at a time: the intermediates stay in the cache.
_PIECE_BYTES = 1 << 20


def dequantize(
    tensor: QuantizedTensor, *, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.quantization.dequantize`."""
    if out is None:
        out = torch.empty(tensor.shape, dtype=out_dtype or torch.float32, device=tensor.device)
    if out.numel() == 0:
        return out
    if tensor.ndim > 2:
        for index in range(tensor.shape[0]):
            dequantize(tensor[index], out=out[index])
        return out
    num_rows, columns = tensor.shape
    step = max(1, _PIECE_BYTES // (4 * columns))
    block = max(tensor.format.block[0], 1)
    step = math.ceil(step / block) * block
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        out[start:stop].copy_(decode(tensor.rows(start, stop)))
    return out


def decode(tensor: QuantizedTensor) -> torch.Tensor:
    """Return the numbers of a single matrix as float32, all at once."""
    logical, scale = tensor.format.logical, tensor.scale
    if logical in GGUF_BLOCKS:
        return _gguf(tensor)
    num_rows, columns = tensor.shape
    if tensor.data.dtype is not torch.uint8:
        values = tensor.data.float()
    elif logical == "uint4":
        values = _looked_up(tensor.data, logical)
        assert tensor.zero_point is not None
        values = _blocks(tensor, values).sub_(tensor.zero_point.unsqueeze(-1)).view(num_rows, columns)
    else:
        values = _looked_up(tensor.data, logical)
    if scale is None:
        return values
    factor = _powers_of_two(values.device)[scale.int()] if scale.dtype is torch.uint8 else scale.float()
    if tensor.format.scale in ("tensor", "channel", "token"):
        return values.mul_(factor)
    if tensor.format.scale.endswith("x128"):
        # The last block may be smaller: spread the factors out, one row of blocks at a time.
        rows = tensor.format.block[0]
        wide = factor.repeat_interleave(128, dim=-1)[:, :columns]
        for index in range(0, num_rows, rows):
            values[index : index + rows].mul_(wide[index // rows])
        return values
    _blocks(tensor, values).mul_(factor.unsqueeze(-1))
    return values if tensor.global_scale is None else values.mul_(tensor.global_scale)


def _blocks(tensor: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    size = tensor.format.block[1] or max(tensor.shape[1], 1)
    return values.view(tensor.shape[0], tensor.shape[1] // size, size)


@functools.cache
def _pairs(logical: str, device: torch.device) -> torch.Tensor:
    """The two numbers of each byte."""
    table = CODE_VALUES[logical]
    with torch.inference_mode(False):  # whoever made it first, others may need it outside of inference mode
        return torch.tensor([[table[byte & 15], table[byte >> 4]] for byte in range(256)], device=device)


def _looked_up(data: torch.Tensor, logical: str) -> torch.Tensor:
    pairs = _pairs(logical, data.device)
    return pairs.index_select(0, data.reshape(-1).int()).view(data.shape[0], 2 * data.shape[1])


@functools.cache
def _powers_of_two(device: torch.device) -> torch.Tensor:
    powers = [2.0 ** (exponent - 127) for exponent in range(255)]
    with torch.inference_mode(False):
        return torch.tensor([*powers, float("nan")], dtype=torch.float64, device=device).float()


def _gguf(tensor: QuantizedTensor) -> torch.Tensor:
    elements, num_bytes = GGUF_BLOCKS[tensor.format.logical]
    num_rows, columns = tensor.shape
    blocks = tensor.data.reshape(num_rows * (columns // elements), num_bytes)
    values = _GGUF[tensor.format.logical](blocks)
    return values.view(num_rows, columns)


def _halves(blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The float16 numbers in bytes first..last-1 of each block, as float32."""
    return blocks[:, first:last].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes of a block whose first half of elements lies in the lower half bytes."""
    num_blocks, size = packed.shape
    codes = torch.empty((num_blocks, 2 * size), dtype=torch.float32, device=packed.device)
    codes[:, :size] = packed & 15
    codes[:, size:] = packed >> 4
    return codes


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks, 0, 2))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    factors = _halves(blocks, 0, 4)
    # The product of a float16 and 4 bits is exact in float32, so that the sum is rounded once.
    return _nibbles(blocks[:, 4:]).mul_(factors[:, :1]).add_(factors[:, 1:])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0, 2))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    num_blocks = blocks.shape[0]
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), dim=1) * _halves(blocks, 0, 2)
    minima = torch.cat((high & 63, mixed >> 4 | high >> 6 << 4), dim=1) * _halves(blocks, 2, 4)
    packed = blocks[:, 16:].view(num_blocks, 4, 1, 32)
    codes = torch.empty((num_blocks, 4, 2, 32), dtype=torch.float32, device=blocks.device)
    codes[:, :, :1] = packed & 15
    codes[:, :, 1:] = packed >> 4
    return codes.view(num_blocks, 8, 32).mul_(scales[:, :, None]).sub_(minima[:, :, None])


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    num_blocks = blocks.shape[0]
    low = blocks[:, :128].view(num_blocks, 2, 2, 32)
    high = blocks[:, 128:192].view(num_blocks, 2, 32)
    codes = torch.empty((num_blocks, 2, 4, 32), dtype=torch.uint8, device=blocks.device)
    codes[:, :, :2] = low & 15
    codes[:, :, 2:] = low >> 4
    for quarter in range(4):
        codes[:, :, quarter] |= (high >> (2 * quarter) & 3) << 4
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks, 208, 210)
    return codes.view(num_blocks, 16, 16).float().sub_(32).mul_(scales[:, :, None])


_GGUF = {"gguf_q4_0": _q4_0, "gguf_q4_1": _q4_1, "gguf_q8_0": _q8_0, "gguf_q4_k": _q4_k, "gguf_q6_k": _q6_k}

"""Packed rows of a latent cache: fp8 latent elements with scales of their own, bf16 rope elements, beside each other in bytes.

A row is latent_dim codes of e4m3, then a float32 scale for each 128 of them, then rope_dim elements of bf16: 656 bytes for 512 and
64, where bf16 takes 1152. An element's value is its code times its scale. NaN codes and NaN scales are NaN.
Source of the layout: FlashMLA's description of its fp8 cache (github.com/deepseek-ai/FlashMLA).
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["SCALE_BLOCK", "pack_rows", "packed_problem", "row_bytes", "unpack_rows"]

SCALE_BLOCK: Final = 128
"""Latent elements that share a scale."""
_SCALE_BYTES: Final = 4
_ROPE_BYTES: Final = 2
_LARGEST: Final = 448.0


def row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Bytes of a row."""
    return latent_dim + latent_dim // SCALE_BLOCK * _SCALE_BYTES + rope_dim * _ROPE_BYTES


def packed_problem(kv_cache: torch.Tensor, latent_dim: int, rope_dim: int) -> tuple[str, str] | None:
    """What is wrong with a cache of packed rows, as (expected, remedy), or None. Its scales are read as float32 where they lie."""
    if latent_dim % SCALE_BLOCK or rope_dim % 2:
        expected = f"latent_dim a multiple of {SCALE_BLOCK} and rope_dim even for a packed cache (uint8)"
        return expected, "keep the cache in q's dtype"
    width = row_bytes(latent_dim, rope_dim)
    if kv_cache.shape[-1] != width:
        expected = (
            f"kv_cache [num_pages, page_size, {width}] uint8: {latent_dim} fp8, {latent_dim // SCALE_BLOCK} fp32, {rope_dim} bf16"
        )
        return expected, "give each token a row of that many bytes, or keep the cache in q's dtype"
    if kv_cache.data_ptr() % _SCALE_BYTES or any(stride % _SCALE_BYTES for stride in kv_cache.stride()[:-1]):
        return f"rows of a packed kv_cache at multiples of {_SCALE_BYTES} bytes", "begin pages and tokens at multiples of 4 bytes"
    return None


def pack_rows(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Quantize: latent [n, latent_dim] and rope [n, rope_dim] to rows [n, bytes] uint8.

    The scale of a block is its largest finite absolute value divided by 448, and 1 where that is 0; a code is that of the number
    nearest to x / scale, of two the even one, and 448 beyond it. All in float32; NaN stays NaN.
    """
    num_rows, latent_dim = latent.shape
    blocks = latent.to(torch.float32).reshape(num_rows, latent_dim // SCALE_BLOCK, SCALE_BLOCK)
    largest = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(2) if latent_dim else blocks.new_zeros((num_rows, 0))
    scale = largest / _LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    # torch's conversion takes what lies beyond 448 for NaN.
    codes = (blocks / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).flatten(1)
    parts = (codes.view(torch.uint8), scale.contiguous().view(torch.uint8), rope.to(torch.bfloat16).contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1)


def unpack_rows(rows: torch.Tensor, latent_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of rows [n, bytes] uint8, in float32 or float64: [n, latent_dim + rope_dim]."""
    num_scales = latent_dim // SCALE_BLOCK
    ends = (latent_dim, latent_dim + num_scales * _SCALE_BYTES)
    codes = rows[:, : ends[0]].contiguous().view(torch.float8_e4m3fn).to(dtype)
    scale = rows[:, ends[0] : ends[1]].contiguous().view(torch.float32).to(dtype)
    rope = rows[:, ends[1] :].contiguous().view(torch.bfloat16).to(dtype)
    latent = codes.view(len(rows), num_scales, SCALE_BLOCK) * scale[..., None]
    return torch.cat((latent.flatten(1), rope), dim=1)

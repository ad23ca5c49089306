"""Tile sizes of the expert kernels: pure functions of the problem, so that a compiled kernel can be found again."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["FewTiles", "Tiles", "few_tiles", "many_tiles", "streams_pairs"]

_STREAMED_PAIRS = 32
_SHARED_BYTES = 96 << 10
"""Shared memory that every target has, but for AMD's older ones."""
_AMD_SHARED_BYTES = 64 << 10


class FewTiles(NamedTuple):
    """Rows and columns of a weight tile where pairs stream weights."""

    rows: int
    depth: int
    num_warps: int


class Tiles(NamedTuple):
    """Tokens, weight rows and columns of a tile on the matrix units."""

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int


def streams_pairs(num_tokens: int, top_k: int) -> bool:
    """Whether each pair reads its expert's weights for itself.

    With few pairs most experts have one token, so that nothing is read twice, and sorting would cost more than it saves.
    """
    return num_tokens * top_k <= max(_STREAMED_PAIRS, top_k)


def few_tiles(columns: int, scale_cols: int, *, matrices: int) -> FewTiles:
    """Tiles for streaming: 8 KiB of half-precision weights of each matrix in flight, a row's columns in one piece if they fit.

    A tile no deeper than a block of 64 or more columns has one scale a row.
    """
    depth = max(16, min(1 << max(columns - 1, 1).bit_length(), 1024 if matrices == 1 else 512))
    if scale_cols >= 64:
        depth = min(depth, scale_cols)
    rows = max(4, min(16, 4096 // (matrices * depth)))
    return FewTiles(rows, max(depth, 2 * scale_cols if scale_cols in (16, 32) else 16), 4)


def many_tiles(
    num_pairs: int, num_experts: int, dtype: torch.dtype, scale_cols: int, *, quantized: bool, matrices: int, amd: bool = False
) -> Tiles:
    """Tiles for sorted rows; `matrices` is 2 where gate and up are multiplied at once.

    The tokens of a tile follow the mean number of pairs of an expert: padding costs matrix operations, which few tokens leave idle,
    but no memory traffic. Many tokens share a wide tile of weights.
    """
    mean = num_pairs / max(num_experts, 1)
    if dtype is torch.float32:
        # IEEE products use the ordinary units: the accumulator, not the operands, limits the tile.
        tiles = Tiles(16, 32, 32, 4, 2) if mean <= 16 else Tiles(32, 64 // matrices, 32, 4, 2)
        depth = max(tiles.depth, 64 if scale_cols >= 64 else 32)
        return tiles._replace(depth=depth)
    if mean <= 16:
        tiles = Tiles(16, 64 // matrices, 128, 4, 4)
    elif mean <= 64:
        tiles = Tiles(64, 128 // matrices, 64, 4, 3)
    else:
        tiles = Tiles(128, 128 // matrices, 64, 8, 3)
    if quantized:
        if tiles.tokens == 16:
            # A scale that holds for a whole step is applied to the sum. Finer ones are applied to values, whatever the depth.
            tiles = tiles._replace(depth=64 if scale_cols == 64 else 128)
        else:
            # Decoded values, and a product apart from the sum, need registers that wider tiles do not leave (sm_80, sm_120).
            tiles = Tiles(64, (64 if scale_cols == 64 else 128) // matrices, 64, 8, 3)
    if amd:
        tiles = tiles._replace(num_stages=2)
    limit = _AMD_SHARED_BYTES if amd else _SHARED_BYTES
    while tiles.num_stages > 1 and _shared_bytes(tiles, matrices) > limit:
        tiles = tiles._replace(num_stages=tiles.num_stages - 1)
    return tiles


def _shared_bytes(tiles: Tiles, matrices: int) -> int:
    """Operands of all stages, in half precision."""
    return tiles.num_stages * 2 * tiles.depth * (tiles.tokens + matrices * tiles.rows)

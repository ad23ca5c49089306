"""Tile sizes of the attention kernels: pure functions of the problem, so that a compiled kernel can be found again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TileConfig", "decode_config", "extend_config", "fp8_as_bytes", "num_splits", "unit_columns"]

_MIN_DOT = 16
"""Least rows, columns and depth of a matrix product in Triton."""
_MERGED_ELEMENTS = 16384
"""Elements of all parts of one row: 128 registers in each of 128 threads."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Rows (queries times grouped heads), keys and elements of a tile, and how a program runs."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def extend_config(
    dtype: torch.dtype, head_dim: int, max_rows: int, max_seqlen_k: int, page_size: int, *, amd: bool = False
) -> TileConfig:
    """Tiles for several queries a request; ``max_rows`` is the most rows (queries times group) of one request."""
    block_d = _power(head_dim, _MIN_DOT, 256)
    if dtype == torch.float32:
        # No matrix units with IEEE products: registers hold whole operands, and only small tiles do not spill (sm_90).
        if block_d <= 64:
            return TileConfig(_power(max_rows, _MIN_DOT, 64), _power(max_seqlen_k, _MIN_DOT, 32), block_d, 8, 1)
        return TileConfig(_MIN_DOT, _MIN_DOT, block_d, 4 if block_d <= 128 else 8, 1)
    if block_d > 128:
        return TileConfig(_power(max_rows, _MIN_DOT, 64), _power(max_seqlen_k, _MIN_DOT, 32), block_d, 8, 2)
    block_m = _power(max_rows, _MIN_DOT, 128)
    if amd and page_size % 64:
        # An address for each key of a tile takes registers that a wave of 64 lanes does not have for 64 keys (gfx950).
        return TileConfig(block_m, _power(max_seqlen_k, _MIN_DOT, 32), block_d, 8 if block_m >= 128 else 4, 2)
    # On Hopper a warp group takes 64 rows; two of them share each key tile.
    return TileConfig(block_m, _power(max_seqlen_k, _MIN_DOT, 64), block_d, 8 if block_m >= 128 else 4, 3)


def decode_config(
    dtype: torch.dtype, head_dim: int, group: int, max_seqlen_k: int, page_size: int, *, amd: bool = False
) -> TileConfig:
    """Tiles for one query a request; its rows are the heads of one group."""
    block_d = _power(head_dim, _MIN_DOT, 256)
    block_m = _power(group, _MIN_DOT, 64)
    if dtype == torch.float32:
        if block_d > 128:
            return TileConfig(_MIN_DOT, _MIN_DOT, block_d, 8, 1)
        return TileConfig(_power(group, _MIN_DOT, 32), _power(max_seqlen_k, _MIN_DOT, 32), block_d, 4, 1)
    block_n = _power(max_seqlen_k, _MIN_DOT, 64)
    if block_d > 128:
        return TileConfig(block_m, block_n, block_d, 4, 2)
    # A key's address waits for its page: Triton spends two stages on that load, and five keep two tiles of keys in flight as three
    # do where a tile lies in one page (seen in the shared memory of the sm_90 code: 71 KB for both).
    return TileConfig(block_m, block_n, block_d, 4, 5 if page_size % block_n and not amd else 3)


def num_splits(programs: int, max_seqlen_k: int, config: TileConfig, num_processors: int) -> int:
    """Parts into which each request's keys are split so that few requests still occupy the device.

    Two programs a processor keep its memory pipes busy; a part of fewer than four key tiles costs more to merge than it saves. All
    parts of a row are merged in registers, which bounds them.
    """
    wanted = max(1, 2 * num_processors // max(1, programs))
    most = max(1, -(-max_seqlen_k // (4 * config.block_n)))
    return min(wanted, most, 128, _MERGED_ELEMENTS // config.block_d)


def unit_columns(table: torch.Tensor) -> torch.Tensor:
    """The table itself, or a copy where the entries of a row do not lie side by side, as the kernels read them."""
    return table if table.stride(1) == 1 else table.contiguous()


def fp8_as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """An fp8 cache as the bytes that the kernels decode, on every GPU alike; another one as it is."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def _power(value: int, low: int, high: int) -> int:
    """The power of two at or above ``value``, between two others."""
    return max(low, min(high, 1 << max(0, value - 1).bit_length()))

"""Tile sizes of the latent attention kernels: pure functions of the problem and of the device's facts, so that tests can compile
for a device that is not there what its launcher would run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

__all__ = [
    "DeviceFacts",
    "LatentConfig",
    "PrefillConfig",
    "device_facts",
    "latent_config",
    "num_splits",
    "packed_config",
    "power_of_two",
    "prefill_config",
]

_MIN_DOT = 16
"""Least rows, columns and depth of a matrix product in Triton."""
_INTERPRETED_PROCESSORS = 4
_MOST_SPLITS = 256


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What tile sizes depend on.

    Attributes:
        processors: multiprocessors or compute units.
        shared_bytes: shared memory that one block may use.
        amd: whether it is one of AMD's.
        major: major number of the compute capability; 0 for AMD's.
    """

    processors: int
    shared_bytes: int
    amd: bool = False
    major: int = 0


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Tiles of one kernel.

    Attributes:
        block_m, block_n: rows (queries times heads) and keys.
        block_l, block_r: latent and rope elements, rounded up to powers of two.
        block_v: elements of the output that a program accumulates; less than block_l where rows are taken by slices.
        chunk: elements of a slice of the row; 0 for whole rows.
        num_warps, num_stages: how a program runs.
    """

    block_m: int
    block_n: int
    block_l: int
    block_r: int
    block_v: int
    chunk: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiles of the kernel over expanded keys.

    Attributes:
        block_m, block_n: rows (queries times grouped heads) and keys.
        block_d, block_e: elements of a head, taken as two powers of two; block_e is 0 where one will do.
        block_v: elements of the output that a program accumulates.
        num_warps, num_stages: how a program runs.
    """

    block_m: int
    block_n: int
    block_d: int
    block_e: int
    block_v: int
    num_warps: int
    num_stages: int


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a device; under the interpreter a few processors, so that keys are split there too."""
    if device.type == "cpu":
        return DeviceFacts(_INTERPRETED_PROCESSORS, 1 << 16)
    found = torch.cuda.get_device_properties(device)
    amd = torch.version.hip is not None
    shared = getattr(found, "shared_memory_per_block_optin", 0) or getattr(found, "shared_memory_per_block", 1 << 16)
    return DeviceFacts(int(found.multi_processor_count), int(shared), amd, 0 if amd else int(found.major))


def latent_config(
    dtype: torch.dtype,
    latent_dim: int,
    rope_dim: int,
    max_rows: int,
    max_seqlen_k: int,
    page_size: int,
    facts: DeviceFacts,
) -> LatentConfig:
    """Tiles for attention over latent rows.

    Args:
        dtype: of queries and rows.
        latent_dim: elements that are key and value.
        rope_dim: elements that are key alone.
        max_rows: the most rows (queries times heads) that share keys.
        max_seqlen_k: the most keys.
        page_size: 1 where each key has an address of its own.
        facts: of the device.
    Returns:
        Tiles that fit into the device's shared memory and, as compiled for the targets of the tests, into its registers.
    """
    block_l, block_r = power_of_two(latent_dim, _MIN_DOT, 1024), power_of_two(rope_dim, _MIN_DOT, 1024)
    if dtype == torch.float32:
        # No matrix units with IEEE products: registers hold whole operands, and whole rows do not fit.
        return LatentConfig(_MIN_DOT, _MIN_DOT, block_l, block_r, min(block_l, 128), min(block_l, 64), 4, 1)
    block_m = power_of_two(max_rows, _MIN_DOT, 64)
    most_keys = power_of_two(max_seqlen_k, _MIN_DOT, 64)
    if facts.amd:
        # A wave of 64 lanes has 512 registers: 32 rows of 512 accumulators and a tile of keys take 480 (gfx942).
        block_m = min(block_m, 32)
        return LatentConfig(block_m, min(most_keys, 32), block_l, block_r, block_l, 0, 4, 1)
    row_bytes = (block_l + block_r) * dtype.itemsize

    def fits(rows: int, keys: int, buffers: int) -> bool:
        return (rows + buffers * keys) * row_bytes + rows * keys * dtype.itemsize <= facts.shared_bytes

    if block_m == 64 and facts.major in (9, 10) and fits(64, 64, 2):
        # Asynchronous products take 64 rows; two groups of warps share the accumulators. Two tiles of 64 keys are in flight, or
        # of 32 where each key has an address of its own: those of 64 would lie in memory instead of registers (sm_90).
        if page_size % most_keys:
            return LatentConfig(64, min(most_keys, 32), block_l, block_r, block_l, 0, 8, 3)
        return LatentConfig(64, most_keys, block_l, block_r, block_l, 0, 8, 2)
    block_n = min(most_keys, 32)
    if block_m == 64 and not fits(64, block_n, 2):
        block_m = 32
    # A key's address that waits for its page takes two stages more before the same two tiles are in flight.
    more = 2 if page_size % block_n else 0
    buffers = 2 if fits(block_m, block_n, 2) else 1
    return LatentConfig(block_m, block_n, block_l, block_r, block_l, 0, 4 if block_m == 16 else 8, buffers + 1 + more)


def packed_config(config: LatentConfig, facts: DeviceFacts) -> LatentConfig:
    """The same for a cache of packed rows: codes become numbers in registers, which hold 32 keys at most, and fewer without
    asynchronous products."""
    if config.chunk:
        return config
    wide = facts.major in (9, 10)
    block_m, block_n = (config.block_m, 32) if wide else (_MIN_DOT, _MIN_DOT)
    block_n = min(config.block_n, block_n)
    return replace(config, block_m=block_m, block_n=block_n, num_warps=8, num_stages=min(config.num_stages, 2))


def prefill_config(
    dtype: torch.dtype, head_dim: int, value_dim: int, max_rows: int, max_seqlen_k: int, facts: DeviceFacts
) -> PrefillConfig:
    """Tiles for attention over expanded keys; ``max_rows`` is the most rows (queries times group) of one request."""
    block_d, block_e = power_of_two(head_dim, _MIN_DOT, 1024), 0
    if block_d > head_dim and block_d > _MIN_DOT:
        half = block_d // 2
        rest = power_of_two(head_dim - half, _MIN_DOT, 1024)
        if rest < half:
            block_d, block_e = half, rest
    block_v = power_of_two(value_dim, _MIN_DOT, 256)
    if dtype == torch.float32:
        return PrefillConfig(_MIN_DOT, _MIN_DOT, block_d, block_e, min(block_v, 64), 8, 1)
    # Two groups of warps with asynchronous products take 128 rows; elsewhere 128 rows of 192 + 128 elements spill.
    wide = block_d + block_e + block_v > 384
    block_m = power_of_two(max_rows, _MIN_DOT, 128 if (facts.major in (9, 10) or facts.amd) and not wide else 64)
    block_n = power_of_two(max_seqlen_k, _MIN_DOT, 32 if wide else 64)
    num_stages = 3 if facts.major in (9, 10) and not wide else 2
    return PrefillConfig(block_m, block_n, block_d, block_e, block_v, 8 if block_m >= 128 else 4, num_stages)


def num_splits(programs: int, max_seqlen_k: int, config: LatentConfig, facts: DeviceFacts) -> int:
    """Parts into which each row's keys are split so that few rows still occupy the device.

    Programs of 16 rows fit on a processor in pairs, larger ones fill it; a part of fewer than two key tiles costs more to merge
    than it saves.
    """
    wanted = max(1, (2 if config.block_m == _MIN_DOT else 1) * facts.processors // max(1, programs))
    most = max(1, -(-max_seqlen_k // (2 * config.block_n)))
    return min(wanted, most, _MOST_SPLITS)


def power_of_two(value: int, low: int, high: int) -> int:
    """The power of two at or above ``value``, between two others."""
    return max(low, min(high, 1 << max(0, value - 1).bit_length()))

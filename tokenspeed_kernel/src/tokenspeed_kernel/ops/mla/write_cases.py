"""Cases of the write of latent rows."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.mla.contract import WRITE_MLA_CACHE
from tokenspeed_kernel.ops.mla.packed import row_bytes
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["WRITE_CASES", "random_write"]


@dataclass(frozen=True, slots=True)
class _Write:
    label: str
    num_tokens: int
    num_pages: int = 6
    page_size: int = 4
    latent_dim: int = 32
    rope_dim: int = 8
    slots: tuple[int, ...] | None = None
    cache_dtype: torch.dtype | None = None
    strided: bool = False

    @property
    def width(self) -> int:
        """Elements of a row of the cache; bytes of a packed one."""
        packed = self.cache_dtype is torch.uint8
        return row_bytes(self.latent_dim, self.rope_dim) if packed else self.latent_dim + self.rope_dim


_WRITES: Final = (
    _Write("one token", 1),
    _Write("no token", 0),
    _Write("no page", 2, num_pages=0, slots=(0, -1)),
    _Write("whole cache", 24),
    _Write("odd sizes", 9, 3, 5, 37, 3),
    _Write("page size 1", 3, 7, 1),
    _Write("512 + 64", 13, 4, 16, 512, 64),
    _Write("outside", 6, slots=(-1, 24, 3, 2**40, -(2**62), 23)),
    _Write("all outside", 3, slots=(-1, -2, 24)),
    _Write("strided", 7, strided=True),
    _Write("into bf16", 7, cache_dtype=torch.bfloat16),
    _Write("into fp32", 7, cache_dtype=torch.float32),
    _Write("packed", 13, 4, 16, 512, 64, cache_dtype=torch.uint8),
    _Write("packed, one block", 3, latent_dim=128, rope_dim=6, cache_dtype=torch.uint8),
    _Write("packed, three blocks, outside", 4, 2, 5, 384, 2, (9, -1, 10, 0), torch.uint8),
    _Write("packed, strided", 7, 6, 4, 256, 8, None, torch.uint8, True),
    _Write("packed, no token", 0, latent_dim=128, cache_dtype=torch.uint8),
)


def _cache(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype is torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(device)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _write_case(shape: _Write, *, bench: bool = False) -> Case:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        width = shape.latent_dim + shape.rope_dim
        rows = torch.randn((shape.num_tokens, width), generator=generator).to(device, dtype)
        if shape.cache_dtype is torch.uint8 and shape.num_tokens > 2:  # a block of zeros, and numbers that no scale is made of
            rows[0, : shape.latent_dim] = 0.0
            rows[1, 3], rows[1, 5], rows[2, 7] = math.nan, math.inf, 1e-3
        cache = _cache((shape.num_pages, shape.page_size, shape.width), generator, shape.cache_dtype or dtype, device)
        slots = torch.randperm(shape.num_pages * shape.page_size, generator=generator)[: shape.num_tokens]
        if shape.slots is not None:
            slots = torch.tensor(shape.slots, dtype=torch.int64)
        if shape.strided:  # every second layer of a pool, every second slot of a list
            pool = _cache((shape.num_pages, 2, shape.page_size, shape.width + 8), generator, cache.dtype, device)
            cache = pool[:, 1, :, 4:-4]
            slots = torch.stack((slots, slots.flip(0)), dim=1)[:, 0]
        latent, rope = rows[:, : shape.latent_dim], rows[:, shape.latent_dim :]
        return {"latent": latent, "rope": rope, "kv_cache": cache, "slot_mapping": slots.to(device)}

    return Case(WRITE_MLA_CACHE.name, shape.label, build, outputs=(), bench=bench, mutated=("kv_cache",))


def random_write(rng: random.Random) -> Case:
    """A case of `write_mla_cache`: any sizes, slots inside and outside of the pool."""
    num_pages, page_size = rng.randint(0, 9), random_size(rng, 20)
    capacity = num_pages * page_size
    slots = rng.sample(range(capacity), rng.randint(0, capacity))
    for outside in (-1, capacity, capacity + 7, -(2**40), 2**40):
        if slots and rng.random() < 0.3:
            slots[rng.randrange(len(slots))] = outside
    stored = rng.choice((None, None, torch.bfloat16, torch.float32, torch.uint8))
    dims = (random_size(rng, 130), random_size(rng, 70))
    if stored is torch.uint8:
        dims = (128 * rng.randint(1, 4), 2 * rng.randint(1, 33))
    sizes = (len(slots), num_pages, page_size, *dims)
    label = f"random {'x'.join(map(str, sizes))} {rng.getrandbits(32):08x}"
    return _write_case(_Write(label, *sizes, tuple(slots), stored, rng.random() < 0.3))


WRITE_CASES: Final = (
    *(_write_case(shape) for shape in _WRITES),
    _write_case(_Write("4096 tokens of 512 + 64", 4096, 128, 64, 512, 64), bench=True),
)
"""Every kernel of `write_mla_cache` meets these."""

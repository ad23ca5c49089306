"""Random cases of the cache write: any page size, slots inside and outside of the pool."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.kvcache.cases import Shape, inputs
from tokenspeed_kernel.ops.kvcache.contract import WRITE_KV
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]


def _write_kv(rng: random.Random) -> Case:
    num_pages, page_size = rng.randint(0, 9), random_size(rng, 20)
    num_slots = num_pages * page_size
    num_tokens = rng.randint(0, num_slots)
    slots = rng.sample(range(num_slots), num_tokens)
    for outside in (-1, num_slots, num_slots + 7, -(2**40), 2**40):
        if slots and rng.random() < 0.3:
            slots[rng.randrange(len(slots))] = outside
    shape = Shape("random", num_tokens, num_pages, page_size, rng.randint(1, 5), random_size(rng, 70), tuple(slots))

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return inputs(shape, dtype=dtype, device=str(device), seed=generator.initial_seed())

    label = f"random {num_tokens} of {num_pages}x{page_size} {shape.num_kv_heads}x{shape.head_dim} {rng.getrandbits(32):08x}"
    return Case(WRITE_KV.name, label, build, outputs=(), mutated=("k_cache", "v_cache"))


RANDOM: Final = {WRITE_KV.name: _write_kv}
"""Makes a case of each op from a random generator."""

"""Random cases of the cache ops: any page size, slots inside and outside of the pool."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.kvcache.cases import Pages, Shape, inputs, page_inputs, scaled_inputs
from tokenspeed_kernel.ops.kvcache.contract import (
    COPY_PAGES,
    QUANTIZE_KV,
    ROPE_WRITE_KV,
    TRANSFER_PAGES,
    WRITE_KV,
    WRITE_SCALED_KV,
)
from tokenspeed_kernel.ops.kvcache.rope_write_cases import random_rope_write
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


def _scaled(rng: random.Random, *, paged: bool) -> Case:
    num_pages, page_size = rng.randint(0, 5), random_size(rng, 12)
    num_tokens = rng.randint(0, num_pages * page_size)
    shape = Shape("random", num_tokens, num_pages, page_size, rng.randint(1, 5), random_size(rng, 70))
    by_head, adversarial = rng.random() < 0.5, rng.random() < 0.3
    label = f"random {num_tokens} of {num_pages}x{page_size} {shape.num_kv_heads}x{shape.head_dim} {rng.getrandbits(32):08x}"
    build = scaled_inputs(shape, by_head=by_head, adversarial=adversarial, paged=paged)
    if paged:
        return Case(WRITE_SCALED_KV.name, label, build, outputs=(), mutated=("k_cache", "v_cache"))
    return Case(QUANTIZE_KV.name, label, build, outputs=("k_out", "v_out"))


def _pages(rng: random.Random, *, transfer: bool) -> Case:
    num_pages = rng.randint(1, 12)
    destinations = rng.sample(range(-1, num_pages + 2), rng.randint(0, num_pages + 1))
    pairs = tuple((rng.randint(-1, num_pages + 1), destination) for destination in destinations)
    page = tuple(random_size(rng, 9) for _ in range(rng.randint(0, 3)))
    label = f"random {len(pairs)} of {num_pages} pages {'x'.join(map(str, page))} {rng.getrandbits(32):08x}"
    pages = Pages("random", pairs, page, num_pages, rng.choice((0, 0, 1, 4)), rng.choice((None, torch.uint8, torch.int64)))
    op, written = (TRANSFER_PAGES.name, "dst_pool") if transfer else (COPY_PAGES.name, "pool")
    return Case(op, label, page_inputs(pages, transfer=transfer), outputs=(), mutated=(written,))


RANDOM: Final = {
    WRITE_KV.name: _write_kv,
    WRITE_SCALED_KV.name: lambda rng: _scaled(rng, paged=True),
    QUANTIZE_KV.name: lambda rng: _scaled(rng, paged=False),
    ROPE_WRITE_KV.name: random_rope_write,
    COPY_PAGES.name: lambda rng: _pages(rng, transfer=False),
    TRANSFER_PAGES.name: lambda rng: _pages(rng, transfer=True),
}
"""Makes a case of each op from a random generator."""

"""Random cases of latent attention: lengths, pages, heads and widths of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.mla.cases import ExpandedBatch, LatentBatch, decode_inputs, expanded_inputs, extend_inputs
from tokenspeed_kernel.ops.mla.contract import MLA_DECODE, MLA_EXTEND, MLA_PREFILL, ROPE_WRITE_MLA, WRITE_MLA_CACHE
from tokenspeed_kernel.ops.mla.rope_write_cases import random_rope_write
from tokenspeed_kernel.ops.mla.write_cases import random_write
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]


def _lengths(rng: random.Random, *, uniform: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys of each request; of as many queries each where `uniform`."""
    num_reqs, alike = rng.randint(0, 5), rng.randint(1, 4)
    queries = tuple(alike if uniform else rng.randint(0, 9) for _ in range(num_reqs))
    return queries, tuple(random_size(rng, 70, low=0) for _ in range(num_reqs))


def _case(op: str, batch: Any, make: Callable[..., dict[str, Any]], rng: random.Random) -> Case:
    return_lse = rng.random() < 0.3

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        inputs = make(batch, generator, device, dtype)
        return {**inputs, "return_lse": True} if return_lse else inputs

    label = f"random q {batch.query_lens} k {batch.seq_lens} {rng.getrandbits(32):08x}"
    # The LSE has no output argument.
    return Case(op, label, build, outputs=() if return_lse else ("out",))


def _latent(rng: random.Random, op: str, make: Callable[..., dict[str, Any]]) -> Case:
    queries, keys = _lengths(rng, uniform=op == MLA_DECODE.name)
    page_size = rng.choice((1, 3, 4, 16, 64))
    pages = [(request, page) for request, length in enumerate(keys) for page in range(-(-length // page_size))]
    packed = rng.random() < 0.25
    batch = LatentBatch(
        "random",
        queries,
        keys,
        num_heads=rng.randint(1, 20),
        latent_dim=128 * rng.randint(1, 3) if packed else random_size(rng, 130),
        rope_dim=2 * rng.randint(1, 35) if packed else random_size(rng, 70),
        page_size=page_size,
        causal=rng.random() < 0.7,
        missing_pages=tuple(rng.sample(pages, min(len(pages), rng.choice((0, 0, 1, 2))))),
        strided=rng.random() < 0.3,
        packed=packed,
    )
    return _case(op, batch, make, rng)


def _expanded(rng: random.Random) -> Case:
    queries, keys = _lengths(rng, uniform=False)
    num_kv_heads = rng.randint(1, 3)
    batch = ExpandedBatch(
        "random",
        queries,
        keys,
        num_heads=num_kv_heads * rng.randint(1, 4),
        num_kv_heads=num_kv_heads,
        head_dim=random_size(rng, 200),
        v_head_dim=random_size(rng, 130),
        causal=rng.random() < 0.7,
        strided=rng.random() < 0.3,
    )
    return _case(MLA_PREFILL.name, batch, expanded_inputs, rng)


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    MLA_DECODE.name: lambda rng: _latent(rng, MLA_DECODE.name, decode_inputs),
    MLA_EXTEND.name: lambda rng: _latent(rng, MLA_EXTEND.name, extend_inputs),
    MLA_PREFILL.name: _expanded,
    WRITE_MLA_CACHE.name: random_write,
    ROPE_WRITE_MLA.name: random_rope_write,
}
"""Makes a case of each op from a random generator."""

"""Random cases of sparse attention: lengths, pages, heads, slots inside and outside of the cache, fp8 keys, ties."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.dsa.cases import IndexerBatch, SparseBatch, indexer_inputs, sparse_inputs
from tokenspeed_kernel.ops.dsa.contract import INDEXER_SCORES, INDEXER_SCORES_RAGGED, SPARSE_DECODE, SPARSE_PREFILL, TOPK_SLOTS
from tokenspeed_kernel.ops.dsa.topk_cases import random_choice
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]


def _case(rng: random.Random, op: str, *, paged: bool) -> Case:
    num_reqs, page_size = rng.randint(0, 5), rng.choice((1, 3, 4, 16, 64))
    seq_lens = tuple(random_size(rng, 90, low=0) for _ in range(num_reqs))
    pages = [(request, page) for request, length in enumerate(seq_lens) for page in range(-(-length // page_size))]
    batch = IndexerBatch(
        "random",
        tuple(rng.randint(0, 6) for _ in range(num_reqs)),
        seq_lens,
        num_heads=rng.randint(1, 12),
        dim=random_size(rng, 130),
        page_size=page_size,
        causal=rng.random() < 0.7,
        fp8=rng.choice(("", "", "keys", "both")),
        missing_pages=tuple(rng.sample(pages, min(len(pages), rng.choice((0, 0, 1, 2))))) if paged else (),
        strided=rng.random() < 0.3,
        extra_columns=rng.choice((0, 7)),
    )

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return indexer_inputs(batch, generator, device, dtype, paged=paged)

    return Case(op, f"random q {batch.query_lens} k {seq_lens} {rng.getrandbits(32):08x}", build)


def _sparse(rng: random.Random, op: str, *, decode: bool) -> Case:
    num_pages = rng.choice((0, 1, 7, 40))
    batch = SparseBatch(
        "random",
        num_reqs=rng.randint(0, 4),
        q_len=rng.randint(1, 4),
        num_slots=random_size(rng, 70, low=0),
        num_heads=rng.randint(1, 20),
        latent_dim=random_size(rng, 130),
        rope_dim=random_size(rng, 70),
        num_pages=num_pages,
        page_size=rng.choice((1, 3, 4, 16)),
        ignored=rng.choice((0.0, 0.2, 0.9)) if num_pages else 1.0,
        strided=rng.random() < 0.3,
    )
    return_lse = rng.random() < 0.3

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        made = sparse_inputs(batch, generator, device, dtype, decode=decode)
        return {**made, "return_lse": True} if return_lse else made

    label = f"random {batch.num_reqs}x{batch.q_len} of {batch.num_slots} slots {rng.getrandbits(32):08x}"
    # The LSE has no output argument.
    return Case(op, label, build, outputs=() if return_lse else ("out",))


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    INDEXER_SCORES.name: lambda rng: _case(rng, INDEXER_SCORES.name, paged=True),
    INDEXER_SCORES_RAGGED.name: lambda rng: _case(rng, INDEXER_SCORES_RAGGED.name, paged=False),
    SPARSE_DECODE.name: lambda rng: _sparse(rng, SPARSE_DECODE.name, decode=True),
    SPARSE_PREFILL.name: lambda rng: _sparse(rng, SPARSE_PREFILL.name, decode=False),
    TOPK_SLOTS.name: random_choice,
}
"""Makes a case of each op from a random generator."""

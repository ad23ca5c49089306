"""Random cases of the indexer's scores: lengths, pages, heads, and fp8 keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.dsa.cases import IndexerBatch, indexer_inputs
from tokenspeed_kernel.ops.dsa.contract import INDEXER_SCORES, INDEXER_SCORES_RAGGED
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


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    INDEXER_SCORES.name: lambda rng: _case(rng, INDEXER_SCORES.name, paged=True),
    INDEXER_SCORES_RAGGED.name: lambda rng: _case(rng, INDEXER_SCORES_RAGGED.name, paged=False),
}
"""Makes a case of each op from a random generator."""

"""Random cases of the embedding: ids inside and outside of the table, any strides."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size

__all__ = ["RANDOM"]

# Rows are copied: every bit must be there.
_EXACT: Final = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), Tolerance(0.0, 0.0))


def _case(rng: random.Random) -> Case:
    num_tokens, vocab, hidden = random_size(rng, 70, low=0), random_size(rng, 300), random_size(rng, 300)
    ids, state = rng.choice((torch.int32, torch.int64)), rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)
        token_ids = torch.randint(-2, vocab + 3, (num_tokens,), generator=generator, dtype=ids).to(device)
        weight = torch.randn(vocab, hidden, generator=generator).to(device, dtype)
        return {"token_ids": token_ids, "weight": random_layout(layout, weight)}

    return Case(EMBEDDING.name, f"random {num_tokens} of {vocab}x{hidden} {state:08x}", build, tolerance=_EXACT)


RANDOM: Final = {EMBEDDING.name: _case}
"""Makes a case of each op from a random generator."""

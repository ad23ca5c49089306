"""Random cases of the embedding: ids inside and outside of the table, any strides."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size
from tokenspeed_kernel.signature import Format

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


def _scaled(rng: random.Random) -> Case:
    num_tokens, vocab, hidden = random_size(rng, 40, low=0), random_size(rng, 300), 256 * rng.randint(1, 3)
    fmt = rng.choice(tuple(fmt for fmt in Format.scaled() if "fnuz" not in fmt.logical))
    ids, state = rng.choice((torch.int32, torch.int64)), rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        token_ids = torch.randint(-2, vocab + 3, (num_tokens,), generator=generator, dtype=ids).to(device)
        return {"token_ids": token_ids, "weight": random_quantized(fmt, (vocab, hidden), generator, device), "out_dtype": dtype}

    return Case(EMBEDDING.name, f"random {fmt} {num_tokens} of {vocab}x{hidden} {state:08x}", build, tolerance=_EXACT)


RANDOM: Final = {EMBEDDING.name: lambda rng: _case(rng) if rng.random() < 0.5 else _scaled(rng)}
"""Makes a case of each op from a random generator."""

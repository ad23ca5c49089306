"""Random cases of attention over ragged and paged keys: lengths, pages, heads, and every option."""

from __future__ import annotations

import functools
import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.attention.cases import Batch, decode_inputs, paged_inputs, ragged_inputs
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE, MHA_EXTEND, MHA_PREFILL
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]

_INPUTS: Final = {MHA_DECODE.name: decode_inputs, MHA_EXTEND.name: paged_inputs, MHA_PREFILL.name: ragged_inputs}


def _case(op: str, rng: random.Random) -> Case:
    num_reqs, num_kv_heads = rng.randint(0, 5), rng.randint(1, 3)
    seq_lens = tuple(random_size(rng, 70, low=0) for _ in range(num_reqs))
    page_size = rng.choice((1, 3, 4, 16, 64))
    query_lens = tuple(1 if op == MHA_DECODE.name else rng.randint(0, 9) for _ in range(num_reqs))
    pages = [(request, page) for request, length in enumerate(seq_lens) for page in range(-(-length // page_size))]
    causal = op == MHA_DECODE.name or rng.random() < 0.7
    batch = Batch(
        "random",
        query_lens,
        seq_lens,
        num_heads=num_kv_heads * rng.randint(1, 5),
        num_kv_heads=num_kv_heads,
        head_dim=random_size(rng, 130),
        page_size=page_size,
        causal=causal,
        sliding_window=rng.choice((None, rng.randint(1, 40))) if causal else None,
        logit_cap=rng.choice((None, None, rng.uniform(0.5, 50.0))),
        sinks=rng.random() < 0.3,
        # Prefill has no pages.
        missing_pages=() if op == MHA_PREFILL.name else tuple(rng.sample(pages, min(len(pages), rng.choice((0, 0, 1, 2))))),
    )
    return_lse = rng.random() < 0.3

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = _INPUTS[op](batch, dtype=dtype, device=str(device), seed=generator.initial_seed())
        return {**made, "return_lse": True} if return_lse else made

    label = f"random q {query_lens} k {seq_lens} {rng.getrandbits(32):08x}"
    # The LSE has no output argument.
    return Case(op, label, build, outputs=() if return_lse else ("out",))


RANDOM: Final = {op: functools.partial(_case, op) for op in _INPUTS}
"""Makes a case of each op from a random generator."""

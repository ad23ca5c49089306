"""Random cases of attention over ragged and paged keys (lengths, pages, heads, every option), and of merged states."""

from __future__ import annotations

import functools
import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.attention.batches import Batch, decode_inputs, paged_inputs, ragged_inputs
from tokenspeed_kernel.ops.attention.contract import (
    MERGE_STATES,
    MHA_DECODE,
    MHA_DECODE_SCALED,
    MHA_EXTEND,
    MHA_EXTEND_SCALED,
    MHA_PREFILL,
)
from tokenspeed_kernel.ops.attention.merge_cases import states
from tokenspeed_kernel.ops.attention.scaled_cases import SCALES, scaled_inputs
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]

_SCALED: Final = (MHA_DECODE_SCALED.name, MHA_EXTEND_SCALED.name)
_DECODING: Final = (MHA_DECODE.name, MHA_DECODE_SCALED.name)
_INPUTS: Final = {MHA_DECODE.name: decode_inputs, MHA_EXTEND.name: paged_inputs, MHA_PREFILL.name: ragged_inputs}


def _batch(op: str, rng: random.Random) -> Batch:
    num_reqs, num_kv_heads = rng.randint(0, 5), rng.randint(1, 3)
    seq_lens = tuple(random_size(rng, 70, low=0) for _ in range(num_reqs))
    page_size = rng.choice((1, 3, 4, 16, 64))
    query_lens = tuple(1 if op in _DECODING else rng.randint(0, 9) for _ in range(num_reqs))
    pages = [(request, page) for request, length in enumerate(seq_lens) for page in range(-(-length // page_size))]
    causal = op in _DECODING or rng.random() < 0.7
    return Batch(
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
        softmax_scale=rng.choice((None, None, rng.uniform(0.01, 1.0))),
        fp8=op in (MHA_DECODE.name, MHA_EXTEND.name) and rng.random() < 0.2,
        # Prefill has no pages.
        missing_pages=() if op == MHA_PREFILL.name else tuple(rng.sample(pages, min(len(pages), rng.choice((0, 0, 1, 2))))),
    )


def _case(op: str, rng: random.Random) -> Case:
    batch = _batch(op, rng)
    return_lse = rng.random() < 0.3
    layouts = rng.choice(SCALES)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any]
        if op in _SCALED:
            made = scaled_inputs(op, batch, generator, device, dtype, *layouts)
        else:
            made = _INPUTS[op](batch, dtype=dtype, device=str(device), seed=generator.initial_seed())
        return {**made, "return_lse": True} if return_lse else made

    label = f"random q {batch.query_lens} k {batch.seq_lens} {rng.getrandbits(32):08x}"
    # The LSE has no output argument.
    return Case(op, label, build, outputs=() if return_lse else ("out",))


def _merge(rng: random.Random) -> Case:
    num_states, shape = rng.randint(1, 9), (random_size(rng, 40, low=0), rng.randint(1, 5), random_size(rng, 130))
    stacked = rng.random() < 0.3
    build = states(
        num_states,
        *shape,
        empty=rng.choice((0.0, 0.3, 0.9)),
        low=rng.choice((0.0, -6e4, 3e4)),
        stacked=stacked,
        strided=not stacked and rng.random() < 0.4,
    )
    label = f"random {num_states} states {'x'.join(map(str, shape))} {rng.getrandbits(32):08x}"
    return Case(MERGE_STATES.name, label, build, outputs=("out", "lse_out"))


RANDOM: Final = {
    **{op: functools.partial(_case, op) for op in (*_INPUTS, *_SCALED)},
    MERGE_STATES.name: _merge,
}
"""Makes a case of each op from a random generator."""

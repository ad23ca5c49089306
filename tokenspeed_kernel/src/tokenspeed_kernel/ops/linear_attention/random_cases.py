"""Random cases of the linear-attention ops: ragged lengths, slots inside and outside of the pool, options in any mixture."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.linear_attention.cases import CONV, GDN, MAMBA2, Kind, Shape, cases_of
from tokenspeed_kernel.ops.linear_attention.contract import (
    CAUSAL_CONV1D_PREFILL,
    CAUSAL_CONV1D_UPDATE,
    GDN_DECODE,
    GDN_PREFILL,
    MAMBA2_PREFILL,
    SELECTIVE_STATE_UPDATE,
)
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]


def _case(rng: random.Random, op: str, kind: Kind, *, ragged: bool) -> Case:
    num_reqs = rng.randint(0, 4)
    length = rng.choice((1, 1, 2, 4))
    lengths = tuple(rng.choice((0, 1, 2, 15, 17, rng.randint(1, 90))) if ragged else length for _ in range(num_reqs))
    slots = rng.sample(range(num_reqs + 2), num_reqs)
    if slots and rng.random() < 0.3:
        slots[rng.randrange(num_reqs)] = rng.choice((-1, num_reqs + 2, 2**31 - 1))
    inside = tuple(place for place, slot in enumerate(slots) if 0 <= slot < num_reqs + 2)
    fresh = tuple(place for place in inside if rng.random() < 0.4) if rng.random() < 0.5 else None
    key_heads = rng.randint(1, 3)
    shape = Shape(
        f"random {'+'.join(map(str, lengths))} tokens {rng.getrandbits(32):08x}",
        lengths,
        key_heads,
        key_heads * rng.randint(1, 3),
        random_size(rng, 40),
        random_size(rng, 40),
        random_size(rng, 300),
        rng.randint(1, 5),
        tuple(slots),
        fresh if ragged else None,
        decay=rng.choice((0.0, 0.1, 1.0, 50.0)),
        beta=rng.choice((None, None, 0.0, 1.0)),
        scale=rng.choice((None, 0.3)),
        l2norm=rng.random() < 0.7,
        activation=rng.choice((None, "silu")),
        with_bias=rng.random() < 0.5,
        skip=rng.random() < 0.5,
        gate=rng.random() < 0.5,
        softplus=rng.random() < 0.5,
        limit=rng.choice((None, (0.05, 0.4))),
        float32_parameters=rng.random() < 0.5,
        strided=rng.random() < 0.5,
    )
    exact, half = cases_of(op, (shape,), kind, ragged)
    return rng.choice((exact, half))


def _maker(op: str, kind: Kind, ragged: bool) -> Callable[[random.Random], Case]:
    return partial(_case, op=op, kind=kind, ragged=ragged)


RANDOM: Final = {
    op: _maker(op, kind, ragged)
    for op, kind, ragged in (
        (GDN_PREFILL.name, GDN, True),
        (GDN_DECODE.name, GDN, False),
        (CAUSAL_CONV1D_PREFILL.name, CONV, True),
        (CAUSAL_CONV1D_UPDATE.name, CONV, False),
        (MAMBA2_PREFILL.name, MAMBA2, True),
        (SELECTIVE_STATE_UPDATE.name, MAMBA2, False),
    )
}
"""Makes a case of each op from a random generator."""

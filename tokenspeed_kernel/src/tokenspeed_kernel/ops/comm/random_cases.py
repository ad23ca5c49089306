"""Random cases of the collectives. Every process draws the same ones, by op and number, and brings values of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.comm.cases import (
    BOTH,
    SUMS,
    exchanged_inputs,
    gathered_inputs,
    normed_inputs,
    reduced_inputs,
    scattered_inputs,
)
from tokenspeed_kernel.ops.comm.contract import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    REDUCTIONS,
)
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["RANDOM"]

_SIZES: Final = ("even", "growing", "one empty")
_FP8: Final = (None, None, torch.float8_e4m3fn, torch.float8_e5m2)


def _row(rng: random.Random) -> tuple[int, ...]:
    return tuple(random_size(rng, 40) for _ in range(rng.randint(1, 2)))


def _label(rng: random.Random, *facts: object) -> str:
    return f"random {' '.join(map(str, facts))} {rng.getrandbits(32):08x}"


def _reduce(rng: random.Random) -> Case:
    shape, reduce = (rng.randint(0, 9), *_row(rng)), rng.choice(REDUCTIONS)
    layout = rng.choice(("contiguous", "transposed", "sliced"))
    build = reduced_inputs(*shape, layout=layout, reduce=reduce)
    return Case(ALL_REDUCE.name, _label(rng, shape, reduce, layout), build, tolerance=SUMS)


def _scatter(rng: random.Random) -> Case:
    rows, row, reduce, sizes = rng.randint(0, 6), _row(rng), rng.choice(REDUCTIONS), rng.choice(_SIZES)
    build = scattered_inputs(rows, *row, reduce=reduce, sizes=sizes)
    return Case(REDUCE_SCATTER.name, _label(rng, rows, row, reduce, sizes), build, tolerance=SUMS)


def _gather(rng: random.Random) -> Case:
    rows, row, sizes, dtype = rng.randint(0, 6), _row(rng), rng.choice(_SIZES), rng.choice(_FP8)
    return Case(ALL_GATHER.name, _label(rng, rows, row, sizes, dtype), gathered_inputs(rows, *row, sizes=sizes, dtype=dtype))


def _exchange(rng: random.Random) -> Case:
    rows, row, uneven, dtype = rng.randint(0, 6), _row(rng), rng.random() < 0.5, rng.choice(_FP8)
    build = exchanged_inputs(rows, *row, uneven=uneven, dtype=dtype)
    return Case(ALL_TO_ALL.name, _label(rng, rows, row, "uneven" if uneven else "even", dtype), build)


def _norm(rng: random.Random) -> Case:
    shape, wide = (rng.randint(0, 9), random_size(rng, 130)), rng.random() < 0.5
    build = normed_inputs(*shape, wide=wide)
    return Case(ALL_REDUCE_ADD_RMS_NORM.name, _label(rng, shape, wide), build, outputs=BOTH, tolerance=SUMS)


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    ALL_REDUCE.name: _reduce,
    REDUCE_SCATTER.name: _scatter,
    ALL_GATHER.name: _gather,
    ALL_TO_ALL.name: _exchange,
    ALL_REDUCE_ADD_RMS_NORM.name: _norm,
}
"""Makes a case of each op from a random generator."""

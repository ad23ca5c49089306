"""Random cases of the activation ops: any number of dimensions, any strides."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.activation.contract import GELU_AND_MUL, SILU_AND_MUL, SWIGLU_CLAMPED
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size, scaled_randn

__all__ = ["RANDOM"]


def _case(op: str, options: Callable[[random.Random], dict[str, Any]], rng: random.Random) -> Case:
    shape = (*(random_size(rng, 9, low=0) for _ in range(rng.randint(0, 3))), random_size(rng, 600, multiple=2, low=2))
    state, chosen = rng.getrandbits(32), options(rng)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)
        gate_up = scaled_randn(layout, generator, *shape).to(device, dtype)
        return {"gate_up": random_layout(layout, gate_up), **chosen}

    return Case(op, f"random {'x'.join(map(str, shape))} {chosen or ''} {state:08x}", build)


def _clamped(rng: random.Random) -> dict[str, Any]:
    return {
        "limit": rng.choice((0.1, 1.0, 7.0)),
        "alpha": rng.choice((1.0, 1.702)),
        "up_offset": rng.choice((0.0, 1.0)),
        "interleaved": rng.random() < 0.5,
    }


RANDOM: Final = {
    SILU_AND_MUL.name: functools.partial(_case, SILU_AND_MUL.name, lambda rng: {}),
    GELU_AND_MUL.name: functools.partial(
        _case, GELU_AND_MUL.name, lambda rng: {"approximate": rng.choice(("none", "tanh"))}
    ),
    SWIGLU_CLAMPED.name: functools.partial(_case, SWIGLU_CLAMPED.name, _clamped),
}
"""Makes a case of each op from a random generator."""

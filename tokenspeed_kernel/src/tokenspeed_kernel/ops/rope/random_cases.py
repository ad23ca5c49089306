"""Random cases of the rotary embedding."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.random_shapes import random_size
from tokenspeed_kernel.ops.rope.cases import Shape, inputs
from tokenspeed_kernel.ops.rope.contract import APPLY_ROPE

__all__ = ["RANDOM"]


def _case(rng: random.Random) -> Case:
    head_dim = random_size(rng, 130, low=2, multiple=2)
    shape = Shape(
        "random",
        random_size(rng, 30, low=0),
        num_heads=rng.randint(1, 9),
        num_kv_heads=rng.randint(1, 4),
        head_dim=head_dim,
        rotary_dim=rng.choice((head_dim, random_size(rng, head_dim, low=2, multiple=2))),
        interleaved=rng.random() < 0.5,
        fused=rng.random() < 0.5,
    )
    sizes = f"{shape.num_tokens}x{shape.num_heads}+{shape.num_kv_heads}x{shape.head_dim} rotary {shape.rotary_dim}"
    kind = f"{' interleaved' if shape.interleaved else ''}{' fused' if shape.fused else ''}"

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return inputs(shape, dtype=dtype, device=str(device), seed=generator.initial_seed())

    return Case(APPLY_ROPE.name, f"random {sizes}{kind}", build, outputs=("q_out", "k_out"))


RANDOM: Final = {APPLY_ROPE.name: _case}
"""Makes a case of each op from a random generator."""

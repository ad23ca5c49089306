"""Random cases of the rotary embedding."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.random_shapes import random_size
from tokenspeed_kernel.ops.rope.cases import Axes, Shape, axes_inputs, inputs
from tokenspeed_kernel.ops.rope.contract import APPLY_ROPE, MULTI_AXIS_COS_SIN

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


def _axes(rng: random.Random) -> Case:
    sections = tuple(rng.randint(0, 20) for _ in range(rng.randint(1, 4)))
    if sum(sections) == 0:
        sections = (*sections, 1)
    shape = Axes(
        "random",
        random_size(rng, 30, low=0),
        sections,
        interleaved=rng.random() < 0.5,
        strided=rng.random() < 0.5,
        index_dtype=rng.choice((torch.int32, torch.int64)),
    )

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return axes_inputs(shape, device=str(device), seed=generator.initial_seed())

    kind = f"{' interleaved' if shape.interleaved else ''}{' strided' if shape.strided else ''} {shape.index_dtype}"
    label = f"random {shape.num_tokens} tokens, sections {shape.sections}{kind}"
    return Case(MULTI_AXIS_COS_SIN.name, label, build, dtypes=(torch.float32,))


RANDOM: Final = {APPLY_ROPE.name: _case, MULTI_AXIS_COS_SIN.name: _axes}
"""Makes a case of each op from a random generator."""

"""Random cases of the norm ops: any number of dimensions, any strides."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.norm.contract import FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size, scaled_randn

__all__ = ["RANDOM"]


def _case(rng: random.Random, *, fused: bool) -> Case:
    shape = (*(random_size(rng, 9, low=0) for _ in range(rng.randint(0, 3))), random_size(rng, 600))
    eps, wide, state = rng.choice((1e-6, 1e-5, 1e-2)), rng.random() < 0.3, rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)
        x = random_layout(layout, scaled_randn(layout, generator, *shape).to(device, dtype))
        weight = (torch.randn(shape[-1], generator=generator) + 1).to(device, torch.float32 if wide else dtype)
        inputs = {"x": x, "weight": weight, "eps": eps}
        if not fused:
            return inputs
        return {**inputs, "residual": random_layout(layout, torch.randn(*shape, generator=generator).to(device, dtype))}

    label = f"random {'x'.join(map(str, shape))} {state:08x}"
    if fused:
        return Case(FUSED_ADD_RMS_NORM.name, label, build, outputs=("out", "residual_out"))
    return Case(RMS_NORM.name, label, build)


RANDOM: Final = {RMS_NORM.name: lambda rng: _case(rng, fused=False), FUSED_ADD_RMS_NORM.name: lambda rng: _case(rng, fused=True)}
"""Makes a case of each op from a random generator."""

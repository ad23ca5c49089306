"""Random cases of the norm ops: any number of dimensions, any strides."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.norm.contract import (
    FUSED_ADD_GEMMA_RMS_NORM,
    FUSED_ADD_RMS_NORM,
    GATED_RMS_NORM,
    GEMMA_RMS_NORM,
    LAYER_NORM,
    RMS_NORM,
)
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size, scaled_randn

__all__ = ["RANDOM"]


def _case(rng: random.Random, op: str, *, other: str = "") -> Case:
    """`other` is a second operand like x."""
    groups = rng.choice((1, 1, 2, 3, 8)) if other == "gate" else 1
    hidden = groups * random_size(rng, 600 // groups)
    shape = (*(random_size(rng, 9, low=0) for _ in range(rng.randint(0, 3))), hidden)
    eps, wide, state = rng.choice((1e-6, 1e-5, 1e-2)), rng.random() < 0.3, rng.getrandbits(32)
    options: dict[str, Any] = {"eps": eps}
    if other == "gate":
        options |= {"norm_before_gate": rng.random() < 0.5, "group_size": hidden // groups if groups > 1 else None}
    biased = op == LAYER_NORM.name and rng.random() < 0.5

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)
        x = random_layout(layout, scaled_randn(layout, generator, *shape).to(device, dtype))
        small = torch.float32 if wide else dtype
        weight, bias = ((torch.randn(hidden, generator=generator) + 1).to(device, small) for _ in range(2))
        inputs = {"x": x, "weight": weight, **options}
        if biased:
            inputs["bias"] = bias
        if other:
            inputs[other] = random_layout(layout, torch.randn(*shape, generator=generator).to(device, dtype))
        return inputs

    label = f"random {'x'.join(map(str, shape))} {state:08x}"
    outputs = ("out", "residual_out") if other == "residual" else ("out",)
    return Case(op, label, build, outputs=outputs)


RANDOM: Final = {
    RMS_NORM.name: lambda rng: _case(rng, RMS_NORM.name),
    FUSED_ADD_RMS_NORM.name: lambda rng: _case(rng, FUSED_ADD_RMS_NORM.name, other="residual"),
    GEMMA_RMS_NORM.name: lambda rng: _case(rng, GEMMA_RMS_NORM.name),
    FUSED_ADD_GEMMA_RMS_NORM.name: lambda rng: _case(rng, FUSED_ADD_GEMMA_RMS_NORM.name, other="residual"),
    LAYER_NORM.name: lambda rng: _case(rng, LAYER_NORM.name),
    GATED_RMS_NORM.name: lambda rng: _case(rng, GATED_RMS_NORM.name, other="gate"),
}
"""Makes a case of each op from a random generator."""

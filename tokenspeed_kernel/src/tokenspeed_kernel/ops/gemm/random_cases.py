"""Random cases of the matrix product: any sizes and strides, with and without bias, plain weights and those of every format."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.gemm.cases_scaled import product_tolerance
from tokenspeed_kernel.ops.gemm.contract import MM, SCALED_PAIRS, WEIGHT_FORMATS
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size
from tokenspeed_kernel.signature import Format

__all__ = ["RANDOM"]


def _leading(rng: random.Random) -> tuple[int, ...]:
    return tuple(random_size(rng, 9, low=0) for _ in range(rng.randint(0, 2)))


def _plain(rng: random.Random) -> Case:
    leading, out_features, in_features = _leading(rng), random_size(rng, 130), random_size(rng, 130)
    with_bias, state = rng.random() < 0.4, rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)

        def tensor(*shape: int) -> torch.Tensor:
            return random_layout(layout, torch.randn(*shape, generator=generator).to(device, dtype))

        inputs = {"x": tensor(*leading, in_features), "weight": tensor(out_features, in_features)}
        return {**inputs, "bias": tensor(out_features)} if with_bias else inputs

    sizes = "x".join(map(str, (*leading, out_features, in_features)))
    label = f"random {sizes}{' with bias' if with_bias else ''} {state:08x}"
    return Case(MM.name, label, build, tolerance=product_tolerance(in_features))


def _scaled(rng: random.Random) -> Case:
    """A weight of some format by plain rows, or by rows of a format that goes with it."""
    left, right = rng.choice(SCALED_PAIRS) if rng.random() < 0.4 else ("", rng.choice(WEIGHT_FORMATS))
    # 256 columns fill the blocks of every format.
    leading, out_features, in_features = _leading(rng), random_size(rng, 140), 256 * rng.randint(1, 2)
    if left:
        leading = (random_size(rng, 40), *leading[:1])
    state = rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        weight = random_quantized(Format.parse(right), (out_features, in_features), generator, device)
        if left:
            rows = random_quantized(Format.parse(left), (*leading, in_features), generator, device)
            return {"x": rows, "weight": weight, "out_dtype": dtype}
        x = torch.randn(*leading, in_features, generator=generator).to(device, dtype)
        return {"x": random_layout(random.Random(state), x), "weight": weight}

    sizes = "x".join(map(str, (*leading, out_features, in_features)))
    return Case(MM.name, f"random {left} {right} {sizes} {state:08x}", build, tolerance=product_tolerance(in_features))


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    MM.name: lambda rng: _plain(rng) if rng.random() < 0.5 else _scaled(rng)
}
"""Makes a case of each op from a random generator."""

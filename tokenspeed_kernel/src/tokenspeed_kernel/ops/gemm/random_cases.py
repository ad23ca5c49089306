"""Random cases of the dense matrix product: any sizes and strides, with and without bias."""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.gemm.contract import MM
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size

__all__ = ["RANDOM"]


def _mm(rng: random.Random) -> Case:
    leading = tuple(random_size(rng, 9, low=0) for _ in range(rng.randint(0, 2)))
    out_features, in_features = random_size(rng, 130), random_size(rng, 130)
    with_bias, state = rng.random() < 0.4, rng.getrandbits(32)
    root = in_features**0.5
    # As for the fixed cases: rounding grows with the root of the number of products.
    tolerance = {
        torch.float32: Tolerance(1e-5, 4e-6 * root),
        torch.float16: Tolerance(2e-3, 1.5 * 2**-11 * root),
        torch.bfloat16: Tolerance(1.6e-2, 1.5 * 2**-8 * root),
    }

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)

        def tensor(*shape: int) -> torch.Tensor:
            return random_layout(layout, torch.randn(*shape, generator=generator).to(device, dtype))

        inputs = {"x": tensor(*leading, in_features), "weight": tensor(out_features, in_features)}
        return {**inputs, "bias": tensor(out_features)} if with_bias else inputs

    sizes = "x".join(map(str, (*leading, out_features, in_features)))
    return Case(MM.name, f"random {sizes}{' with bias' if with_bias else ''} {state:08x}", build, tolerance=tolerance)


RANDOM: Final = {MM.name: _mm}
"""Makes a case of each op from a random generator."""

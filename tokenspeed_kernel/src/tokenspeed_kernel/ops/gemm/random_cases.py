"""Random cases of the matrix products: any sizes and strides, with and without bias, plain operands and those of every format."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.gemm.cases_pack import random_pack
from tokenspeed_kernel.ops.gemm.cases_scaled import product_tolerance
from tokenspeed_kernel.ops.gemm.contract import (
    BMM,
    GROUPED_MM_CONTIGUOUS,
    GROUPED_MM_MASKED,
    MM,
    PACK_WEIGHT,
    SCALED_PAIRS,
    WEIGHT_FORMATS,
)
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["RANDOM"]

_Operands = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


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
    return Case(MM.name, f"random {left} {right} {sizes} {state:08x}", build, tolerance=_tolerance(left, in_features))


def _tolerance(x: str, in_features: int) -> dict[torch.dtype, Tolerance]:
    return product_tolerance(in_features, coarse=x.startswith("fp8"), rounded=not x)


def _operands(rng: random.Random, rows: tuple[int, ...], weights: tuple[int, int]) -> tuple[_Operands, str, int]:
    """What makes x and the weights of a stack, the formats, and the depth."""
    experts, out_features = weights
    state, kind = rng.getrandbits(32), rng.random()
    left, right = ("", "") if kind < 0.5 else rng.choice(SCALED_PAIRS) if kind < 0.7 else ("", rng.choice(WEIGHT_FORMATS))
    depth = 256 if right else random_size(rng, 130)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)

        def one(text: str, shape: tuple[int, ...]) -> torch.Tensor | QuantizedTensor:
            if text:
                return random_quantized(Format.parse(text), shape, generator, device)
            return random_layout(layout, torch.randn(*shape, generator=generator).to(device, dtype))

        operands = {"x": one(left, (*rows, depth)), "weight": one(right, (experts, out_features, depth))}
        return {**operands, "out_dtype": dtype} if left else operands

    return build, f"{left} {right} {'x'.join(map(str, (*rows, experts, out_features, depth)))} {state:08x}".strip(), depth


def _stack(rng: random.Random, op: str) -> Case:
    experts, out_features, num_rows = random_size(rng, 5), random_size(rng, 80), random_size(rng, 70, low=0)
    rows = (num_rows,) if op == GROUPED_MM_CONTIGUOUS.name else (experts, random_size(rng, 40, low=0))
    operands, label, depth = _operands(rng, rows, (experts, out_features))
    bounds = sorted(rng.randint(0, num_rows) for _ in range(experts))
    ids = sorted(rng.randint(0, experts - 1) for _ in range(num_rows))
    ids = [rng.choice((-1, experts, 2**31 - 1)) if rng.random() < 0.2 else expert for expert in ids]
    counts = [rng.choice((0, rows[-1], -1, rng.randint(0, rows[-1] + 2))) for _ in range(experts)]
    by_ids, integer = rng.random() < 0.5, rng.choice((torch.int32, torch.int64))

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        inputs = operands(generator, device, dtype)
        if op == GROUPED_MM_MASKED.name:
            return {**inputs, "masked_m": torch.tensor(counts, dtype=integer, device=device)}
        if op == GROUPED_MM_CONTIGUOUS.name:
            owners = torch.tensor(ids if by_ids else [0, *bounds], dtype=integer, device=device)
            return {**inputs, "expert_ids" if by_ids else "offsets": owners}
        return inputs

    tolerance = product_tolerance(depth, coarse=label.startswith("fp8") and label.count("@") == 2, rounded=label.count("@") == 1)
    return Case(op, f"random {label}", build, tolerance=tolerance)


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    MM.name: lambda rng: _plain(rng) if rng.random() < 0.5 else _scaled(rng),
    BMM.name: lambda rng: _stack(rng, BMM.name),
    GROUPED_MM_CONTIGUOUS.name: lambda rng: _stack(rng, GROUPED_MM_CONTIGUOUS.name),
    GROUPED_MM_MASKED.name: lambda rng: _stack(rng, GROUPED_MM_MASKED.name),
    PACK_WEIGHT.name: random_pack,
}
"""Makes a case of each op from a random generator."""

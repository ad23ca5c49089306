"""Random cases of quantization, both ways: every format, stacks of any depth, numbers of any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, QUANTIZE, QUANTIZE_FORMATS
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size
from tokenspeed_kernel.signature import Format

__all__ = ["RANDOM"]

_FORMATS: Final = tuple(fmt for fmt in Format.scaled() if "fnuz" not in fmt.logical)
_TARGETS: Final = tuple(dict.fromkeys(fmt for one in QUANTIZE_FORMATS if (fmt := one.get("out")) is not None))
# Each number has one value: every bit must be there.
_EXACT: Final = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), Tolerance(0.0, 0.0))


def _dequantize(rng: random.Random) -> Case:
    fmt = rng.choice(_FORMATS)
    # 256 columns fill the blocks of every format.
    shape = (*(rng.randint(0, 3) for _ in range(rng.randint(0, 2))), random_size(rng, 140), 256 * rng.randint(1, 3))

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {"tensor": random_quantized(fmt, shape, generator, device, every_code=True), "out_dtype": dtype}

    label = f"random {fmt} {'x'.join(map(str, shape))} {rng.getrandbits(32):08x}"
    return Case(DEQUANTIZE.name, label, build, tolerance=_EXACT)


def _quantize(rng: random.Random) -> Case:
    fmt = rng.choice(_TARGETS)
    columns = random_size(rng, 400) if fmt.logical.startswith("fp8") else 128 * rng.randint(1, 4)
    shape = (*(rng.randint(0, 3) for _ in range(rng.randint(0, 2))), random_size(rng, 40, low=0), columns)
    state = rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        draw = random.Random(state)
        x = torch.randn(*shape, generator=generator) * 2.0 ** draw.randint(-30, 12)
        x = x.masked_fill(torch.rand(shape, generator=generator) < draw.choice((0.0, 0.5)), 0.0)
        if draw.random() < 0.3:
            odd = torch.rand(shape, generator=generator) < 0.01
            x = x.masked_fill(odd, draw.choice((float("nan"), float("inf"), -float("inf"))))
        return {"x": random_layout(draw, x.to(device, dtype)), "format": fmt}

    return Case(QUANTIZE.name, f"random {fmt} {'x'.join(map(str, shape))} {state:08x}", build)


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {DEQUANTIZE.name: _dequantize, QUANTIZE.name: _quantize}
"""Makes a case of each op from a random generator."""

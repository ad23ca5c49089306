"""Random cases of dequantization: every format, stacks of any depth."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE
from tokenspeed_kernel.ops.random_shapes import random_size
from tokenspeed_kernel.signature import Format

__all__ = ["RANDOM"]

_FORMATS: Final = tuple(fmt for fmt in Format.scaled() if "fnuz" not in fmt.logical)
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


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {DEQUANTIZE.name: _dequantize}
"""Makes a case of each op from a random generator."""

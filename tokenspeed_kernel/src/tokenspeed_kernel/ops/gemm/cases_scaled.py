"""Cases of `mm` with quantized operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.gemm.contract import MM, SCALED_PAIRS, WEIGHT_FORMATS
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.signature import Format

__all__ = ["SCALED_CASES", "product_tolerance"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def product_tolerance(in_features: int, *, coarse: bool = False, rounded: bool = False) -> dict[torch.dtype, Tolerance]:
    """Rounding grows with the root of the number of unit-normal products that are summed. A library that splits the sum may
    round each part to half precision; a tf32 product would be off by 2**-11 times that root, and is caught.

    Args:
        in_features: how many are summed.
        coarse: the matrix unit may add the products with some 14 bits, as that of sm_90 does those of fp8.
        rounded: half-precision products are of weights that were rounded to half precision, as the contract allows.
    """
    root = max(in_features, 1) ** 0.5
    steps = 3.0 if rounded else 1.5
    return {
        torch.float32: Tolerance(4e-3, 2**-9 * root) if coarse else Tolerance(1e-5, 1e-5 * root),
        torch.float16: Tolerance(4e-3, 2**-9 * root) if coarse else Tolerance(2e-3, steps * 2**-11 * root),
        torch.bfloat16: Tolerance(1.6e-2, steps * 2**-8 * root),
    }


def _weight_only(weight: str, *shape: int, bias: bool = False, layout: str = "contiguous", wide: bool = False) -> _Build:
    """`shape` is x's leading dimensions, then out_features, then in_features."""
    *leading, out_features, in_features = shape

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*leading, in_features, generator=generator).to(device, dtype)
        if layout == "transposed":
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if layout == "sliced":
            x = torch.repeat_interleave(x, 2, dim=-1)[..., ::2]
        inputs: dict[str, Any] = {"x": x}
        inputs["weight"] = random_quantized(Format.parse(weight), (out_features, in_features), generator, device)
        if bias:
            inputs["bias"] = torch.randn(out_features, generator=generator).to(device, torch.float32 if wide else dtype)
        return {**inputs, "out_dtype": torch.float32} if wide else inputs

    return build


def _both(x: str, weight: str, *shape: int, bias: bool = False) -> _Build:
    *leading, out_features, in_features = shape

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        left = random_quantized(Format.parse(x), (*leading, in_features), generator, device)
        right = random_quantized(Format.parse(weight), (out_features, in_features), generator, device)
        offset = torch.randn(out_features, generator=generator).to(device, dtype) if bias else None
        return {"x": left, "weight": right, "bias": offset, "out_dtype": dtype}

    return build


_FP8, _FP4, _GGUF = "fp8_e4m3@block_128x128", "nvfp4@block_16", "gguf_q4_1@inline"
_ONE_EACH: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("no rows", (0, 8, 256), {}),
    ("no features", (3, 0, 256), {}),
    ("no depth", (3, 5, 0), {"bias": True}),
    ("one row", (1, 48, 256), {}),
    ("many rows", (70, 66, 256), {}),
    ("20 rows", (20, 130, 256), {"bias": True}),
    ("3d", (2, 3, 20, 256), {}),
    ("vector", (20, 256), {"bias": True}),
    ("transposed", (5, 20, 256), {"layout": "transposed"}),
    ("sliced", (2, 3, 20, 256), {"layout": "sliced"}),
    ("fp32 out and bias", (4, 24, 256), {"bias": True, "wide": True}),
)
_BENCH_PAIRS = (("fp8_e4m3@block_1x128", _FP8), ("fp8_e4m3@token", "fp8_e4m3@channel"), (_FP4, _FP4))
_BENCH_WEIGHTS = (_FP8, _FP4, "mxfp4@block_32", "int4@group_128", _GGUF)


def _case(label: str, build: _Build, in_features: int, *, bench: bool = False) -> Case:
    coarse = label.startswith("fp8_e4m3@") and label.count("fp8_e4m3@") == 2
    tolerance = product_tolerance(in_features, coarse=coarse, rounded=label.count("@") == 1)
    if label == f"{_GGUF} fp32 out and bias":
        # From half-precision operands it is no more exact than a half-precision result.
        tolerance[torch.float32] = tolerance[torch.bfloat16]
    return Case(MM.name, label, build, tolerance=tolerance, bench=bench)


SCALED_CASES = (
    *(_case(f"{fmt} odd 3x37x512", _weight_only(fmt, 3, 37, 512, bias=True), 512) for fmt in WEIGHT_FORMATS),
    *(
        _case(f"{fmt} {label}", _weight_only(fmt, *shape, **options), shape[-1])
        for fmt in (_FP8, _FP4, _GGUF)
        for label, shape, options in _ONE_EACH
    ),
    # Blocks of 128 that the matrix does not fill.
    _case(f"{_FP8} 5x130x200", _weight_only(_FP8, 5, 130, 200), 200),
    *(_case(f"{x} {weight} odd 5x33x256", _both(x, weight, 5, 33, 256, bias=True), 256) for x, weight in SCALED_PAIRS),
    *(
        _case(f"{x} {weight} {label}", _both(x, weight, *shape), shape[-1])
        for x, weight in _BENCH_PAIRS
        for label, shape in (
            ("no rows", (0, 8, 256)),
            ("no depth", (3, 5, 0)),
            ("70x130x384", (70, 130, 384)),
            ("3d", (2, 3, 20, 128)),
        )
    ),
    _case(f"fp8_e4m3@block_1x128 {_FP8} 5x130x200", _both("fp8_e4m3@block_1x128", _FP8, 5, 130, 200), 200),
    *(
        _case(f"{fmt} {rows}x4096x4096", _weight_only(fmt, rows, 4096, 4096), 4096, bench=True)
        for fmt in _BENCH_WEIGHTS
        for rows in (1, 16, 64, 512)
    ),
    *(
        _case(f"{x} {weight} {rows}x4096x4096", _both(x, weight, rows, 4096, 4096), 4096, bench=True)
        for x, weight in _BENCH_PAIRS
        for rows in (1, 16, 64, 512, 4096)
    ),
)
"""Every kernel of `mm` meets these, unless its formats leave one out."""

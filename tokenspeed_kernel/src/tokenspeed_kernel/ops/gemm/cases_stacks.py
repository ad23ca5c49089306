"""Cases of the products of stacks of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.gemm.cases_scaled import product_tolerance
from tokenspeed_kernel.ops.gemm.contract import BMM, GROUPED_MM_CONTIGUOUS, GROUPED_MM_MASKED, SCALED_PAIRS, WEIGHT_FORMATS
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["STACK_CASES"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
_PLAIN = "plain"
# Formats of x and weight.
_FORMATS = (
    ("plain", "fp8_e4m3@block_128x128"),
    ("plain", "fp8_e4m3@channel"),
    ("plain", "mxfp8_e4m3@block_32"),
    ("plain", "mxfp4@block_32"),
    ("plain", "nvfp4@block_16"),
    ("plain", "mxint4@block_32"),
    ("plain", "int4@group_32"),
    ("plain", "uint4@group_128"),
    ("plain", "gguf_q4_1@inline"),
    ("fp8_e4m3@block_1x128", "fp8_e4m3@block_128x128"),
    ("fp8_e4m3@token", "fp8_e4m3@channel"),
    ("mxfp8_e4m3@block_32", "mxfp4@block_32"),
    ("nvfp4@block_16", "nvfp4@block_16"),
)
_PAIRS = (*((_PLAIN, weight) for weight in WEIGHT_FORMATS), *SCALED_PAIRS)
# The others differ in the decoding of a tile alone, which the products share: one dtype is enough for them.
_OTHERS = tuple(pair for pair in _PAIRS if pair not in _FORMATS)


def _operand(
    text: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device, dtype: torch.dtype, layout: str
) -> torch.Tensor | QuantizedTensor:
    if text != _PLAIN:
        return random_quantized(Format.parse(text), shape, generator, device)
    plain = torch.randn(shape, generator=generator).to(device, dtype)
    if layout == "transposed":
        return plain.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        return torch.repeat_interleave(torch.repeat_interleave(plain, 2, dim=-1), 2, dim=0)[::2, ..., ::2]
    return plain


def _options(x: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> dict[str, Any]:
    wanted = out_dtype or (dtype if x != _PLAIN else None)
    return {} if wanted is None else {"out_dtype": wanted}


def _bmm(
    *shape: int, x: str = _PLAIN, weight: str = _PLAIN, layout: str = "contiguous", out_dtype: torch.dtype | None = None
) -> _Build:
    """`shape`: batch, rows, out_features, in_features."""
    batch, rows, out_features, in_features = shape

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        left = _operand(x, (batch, rows, in_features), generator, device, dtype, layout)
        right = _operand(weight, (batch, out_features, in_features), generator, device, dtype, layout)
        return {"x": left, "weight": right, **_options(x, dtype, out_dtype)}

    return build


def _masked(*shape: int, counts: tuple[int, ...], x: str = _PLAIN, weight: str = _PLAIN, layout: str = "contiguous") -> _Build:
    """`shape`: max_m, out_features, in_features."""
    max_m, out_features, in_features = shape

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        left = _operand(x, (len(counts), max_m, in_features), generator, device, dtype, layout)
        right = _operand(weight, (len(counts), out_features, in_features), generator, device, dtype, layout)
        if isinstance(left, torch.Tensor):
            for expert, count in enumerate(counts):
                left[expert, max(count, 0) :] = float("nan")  # what nobody may read
        masked_m = torch.tensor(counts, dtype=torch.int64 if layout == "sliced" else torch.int32, device=device)
        masked_m = torch.repeat_interleave(masked_m, 2)[::2] if layout == "sliced" else masked_m
        return {"x": left, "weight": right, "masked_m": masked_m, **_options(x, dtype, None)}

    return build


def _contiguous(
    num_rows: int,
    out_features: int,
    in_features: int,
    *,
    offsets: tuple[int, ...] = (),
    ids: tuple[int, ...] = (),
    experts: int = 0,
    x: str = _PLAIN,
    weight: str = _PLAIN,
    layout: str = "contiguous",
    out_dtype: torch.dtype | None = None,
) -> _Build:
    num_experts = experts or len(offsets) - 1

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        left = _operand(x, (num_rows, in_features), generator, device, dtype, layout)
        right = _operand(weight, (num_experts, out_features, in_features), generator, device, dtype, layout)
        owners = torch.tensor(offsets or ids, dtype=torch.int64 if layout == "sliced" else torch.int32, device=device)
        if isinstance(left, torch.Tensor):
            padding = [row for row, expert in enumerate(ids) if not 0 <= expert < num_experts]
            left[[*range(offsets[-1], num_rows)] if offsets else padding] = float("nan")  # what nobody may read
        owners = torch.repeat_interleave(owners, 2)[::2] if layout == "sliced" else owners
        which = "offsets" if offsets else "expert_ids"
        return {"x": left, "weight": right, which: owners, **_options(x, dtype, out_dtype)}

    return build


def _even(num_rows: int, num_experts: int) -> tuple[int, ...]:
    return tuple(num_rows * expert // num_experts for expert in range(num_experts + 1))


_FP32 = torch.float32
_BMM: tuple[tuple[str, _Build, int, bool], ...] = (
    ("no matrices 0x3x5x16", _bmm(0, 3, 5, 16), 16, False),
    ("no rows 2x0x5x16", _bmm(2, 0, 5, 16), 16, False),
    ("no depth 2x3x5x0", _bmm(2, 3, 5, 0), 1, False),
    ("odd 3x5x33x37", _bmm(3, 5, 33, 37), 37, False),
    ("many rows 2x70x66x40", _bmm(2, 70, 66, 40), 40, False),
    ("transposed 3x5x24x32", _bmm(3, 5, 24, 32, layout="transposed"), 32, False),
    ("sliced 3x5x24x32", _bmm(3, 5, 24, 32, layout="sliced"), 32, False),
    ("fp32 out 2x4x24x32", _bmm(2, 4, 24, 32, out_dtype=_FP32), 32, False),
    *((f"{x} {weight} 2x3x20x256", _bmm(2, 3, 20, 256, x=x, weight=weight), 256, False) for x, weight in _FORMATS),
    *((f"{x} {weight} 1x2x9x256", _bmm(1, 2, 9, 256, x=x, weight=weight), 256, False) for x, weight in _OTHERS),
    ("16x64x512x128", _bmm(16, 64, 512, 128), 128, True),
    ("128x1x128x512", _bmm(128, 1, 128, 512), 512, True),
)
_CONTIGUOUS: tuple[tuple[str, _Build, int, bool], ...] = (
    ("no rows", _contiguous(0, 24, 32, offsets=(0, 0, 0)), 32, False),
    ("no experts", _contiguous(3, 24, 32, offsets=(0,)), 32, False),
    ("no depth", _contiguous(4, 5, 0, offsets=(0, 2, 4)), 1, False),
    ("odd, an expert without rows 10x33x37", _contiguous(10, 33, 37, offsets=(0, 3, 3, 7, 10)), 37, False),
    ("rows of nobody 23x24x32", _contiguous(23, 24, 32, offsets=(0, 1, 1, 4)), 32, False),
    ("no expert has rows 5x24x32", _contiguous(5, 24, 32, offsets=(0, 0, 0, 0)), 32, False),
    ("one expert has all 40x24x32", _contiguous(40, 24, 32, offsets=(0, 0, 40, 40)), 32, False),
    ("many rows 150x40x48", _contiguous(150, 40, 48, offsets=(0, 70, 140, 149)), 48, False),
    ("transposed 10x24x32", _contiguous(10, 24, 32, offsets=(0, 3, 10), layout="transposed"), 32, False),
    ("sliced 10x24x32", _contiguous(10, 24, 32, offsets=(0, 3, 9), layout="sliced"), 32, False),
    ("fp32 out 6x24x32", _contiguous(6, 24, 32, offsets=(0, 2, 6), out_dtype=_FP32), 32, False),
    ("ids no rows", _contiguous(0, 24, 32, experts=3), 32, False),
    ("ids padded 12x24x32", _contiguous(12, 24, 32, ids=(0, 0, -1, -1, 2, 2, 2, -1, 3, 3, 3, 3), experts=4), 32, False),
    ("ids out of range 6x24x32", _contiguous(6, 24, 32, ids=(-7, 0, 1, 2, 3, 2**31 - 1), experts=2), 32, False),
    ("ids unsorted 7x24x32", _contiguous(7, 24, 32, ids=(2, 0, 2, 1, 1, -1, 0), experts=3), 32, False),
    ("ids sliced 7x24x32", _contiguous(7, 24, 32, ids=(0, 0, 1, 1, -1, 2, 2), experts=3, layout="sliced"), 32, False),
    *(
        (f"{x} {weight} 9x20x256", _contiguous(9, 20, 256, offsets=(0, 4, 4, 8), x=x, weight=weight), 256, False)
        for x, weight in _FORMATS
    ),
    *(
        (f"{x} {weight} 4x9x256", _contiguous(4, 9, 256, offsets=(0, 1, 4), x=x, weight=weight), 256, False)
        for x, weight in _OTHERS
    ),
    ("128 experts 8x768x2048", _contiguous(8, 768, 2048, offsets=_even(8, 128)), 2048, True),
    ("128 experts 512x768x2048", _contiguous(512, 768, 2048, offsets=_even(512, 128)), 2048, True),
    ("8 experts 4096x2048x2048", _contiguous(4096, 2048, 2048, offsets=_even(4096, 8)), 2048, True),
    *(
        (
            f"{x} {weight} 32 experts 256x2048x2048",
            _contiguous(256, 2048, 2048, offsets=_even(256, 32), x=x, weight=weight),
            2048,
            True,
        )
        for x, weight in (("fp8_e4m3@block_1x128", "fp8_e4m3@block_128x128"), ("plain", "mxfp4@block_32"), ("nvfp4@block_16",) * 2)
    ),
)
_MASKED: tuple[tuple[str, _Build, int, bool], ...] = (
    ("no experts", _masked(3, 24, 32, counts=()), 32, False),
    ("no room 0x24x32", _masked(0, 24, 32, counts=(0, 0)), 32, False),
    ("odd, an expert without rows 5x33x37", _masked(5, 33, 37, counts=(2, 0, 5, 1)), 37, False),
    ("counts out of range 5x24x32", _masked(5, 24, 32, counts=(-3, 9, 2**31 - 1)), 32, False),
    ("many rows 70x24x32", _masked(70, 24, 32, counts=(66, 3)), 32, False),
    ("transposed 5x24x32", _masked(5, 24, 32, counts=(2, 4), layout="transposed"), 32, False),
    ("sliced 5x24x32", _masked(5, 24, 32, counts=(2, 5), layout="sliced"), 32, False),
    *(
        (f"{x} {weight} 4x20x256", _masked(4, 20, 256, counts=(3, 0, 4), x=x, weight=weight), 256, False)
        for x, weight in _FORMATS
    ),
    *(
        (f"{x} {weight} 2x9x256", _masked(2, 9, 256, counts=(1, 2), x=x, weight=weight), 256, False) for x, weight in _OTHERS
    ),
    ("32 experts of 64x2048x2048", _masked(64, 2048, 2048, counts=tuple(range(1, 65, 2))), 2048, True),
)

def _case(op: str, label: str, build: _Build, in_features: int, bench: bool) -> Case:
    weight_only = label.startswith(f"{_PLAIN} ")
    tolerance = product_tolerance(in_features, coarse=label.startswith("fp8_"), rounded=weight_only)
    once = tuple(label.split()[:2]) in _OTHERS
    return Case(op, label, build, tolerance=tolerance, bench=bench, dtypes=(torch.bfloat16,) if once else ())


STACK_CASES = tuple(
    _case(op.name, *case)
    for op, cases in ((BMM, _BMM), (GROUPED_MM_CONTIGUOUS, _CONTIGUOUS), (GROUPED_MM_MASKED, _MASKED))
    for case in cases
)
"""Every kernel of these ops meets these, unless its formats leave one out."""

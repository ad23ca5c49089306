"""Cases of the rope op: shapes, inputs made from a seed, tolerances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.rope.config import RopeConfig
from tokenspeed_kernel.ops.rope.contract import APPLY_ROPE, MULTI_AXIS_COS_SIN
from tokenspeed_kernel.ops.rope.frequencies import rope_cos_sin


@dataclass(frozen=True, slots=True)
class Shape:
    """Shapes of one call; ``fused`` makes q and k slices of one projection, as an engine has them."""

    name: str
    num_tokens: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    interleaved: bool = False
    fused: bool = False

    def __str__(self) -> str:
        return self.name


SHAPES: Final = (
    Shape("one_token", 1),
    Shape("no_token", 0),
    Shape("odd_sizes", 7, 3, 1, 20, 20),
    Shape("fused", 5, fused=True),
    Shape("model_shape", 9, 9, 3, 64, 64, fused=True),
    Shape("partial", 5, rotary_dim=6),
    Shape("interleaved", 5, interleaved=True),
    Shape("interleaved_partial", 5, 3, 3, 24, 12, interleaved=True, fused=True),
)

TOLERANCES: Final = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(shape: Shape, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Arguments of `apply_rope`, without outputs."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    made = torch.randn((shape.num_tokens, num_heads, shape.head_dim), generator=generator, dtype=torch.float64)
    projection = made.to(device, dtype)
    q = projection[:, : shape.num_heads]
    k = projection[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
    config = RopeConfig(shape.head_dim, shape.rotary_dim)
    return {
        "q": q if shape.fused else q.contiguous(),
        "k": k if shape.fused else k.contiguous(),
        "positions": torch.randint(0, 500, (shape.num_tokens,), generator=generator).to(device),
        "cos_sin_cache": rope_cos_sin(config, 500, device=device),
        "interleaved": shape.interleaved,
    }


def _build(shape: Shape) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
    return lambda generator, device, dtype: inputs(shape, dtype=dtype, device=str(device), seed=generator.initial_seed())


@dataclass(frozen=True, slots=True)
class Axes:
    """Shapes of one call of `multi_axis_cos_sin`."""

    name: str
    num_tokens: int
    sections: tuple[int, ...] = (3, 3, 2)
    interleaved: bool = False
    strided: bool = False
    index_dtype: torch.dtype = torch.int64


def axes_inputs(shape: Axes, *, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Arguments of `multi_axis_cos_sin`, without output."""
    generator = torch.Generator().manual_seed(seed)
    rotary_dim = 2 * sum(shape.sections)
    positions = torch.randint(0, 300, (shape.num_tokens, len(shape.sections)), generator=generator).to(device, shape.index_dtype)
    return {
        "cos_sin_cache": rope_cos_sin(RopeConfig(rotary_dim, rotary_dim), 300, device=device),
        "positions": positions.t() if shape.strided else positions.t().contiguous(),
        "sections": shape.sections,
        "interleaved": shape.interleaved,
    }


def _build_axes(shape: Axes) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
    return lambda generator, device, dtype: axes_inputs(shape, device=str(device), seed=generator.initial_seed())


AXES: Final = (
    Axes("one token", 1),
    Axes("no token", 0),
    Axes("odd sizes", 7, (1, 5, 3)),
    Axes("strided", 9, strided=True),
    Axes("int32", 5, index_dtype=torch.int32),
    Axes("one axis", 5, (8,)),
    Axes("four axes", 5, (2, 2, 3, 1), interleaved=True),
    Axes("an axis without pairs", 5, (4, 0, 4)),
    Axes("interleaved", 9, (24, 20, 20), interleaved=True),
    Axes("interleaved, shares not alike", 9, (11, 11, 10), interleaved=True),
    Axes("in sections", 9, (16, 24, 24)),
)
_EXACT: Final = {torch.float32: Tolerance(0.0, 0.0)}
_FP32: Final = (torch.float32,)

CASES: Final = (
    *(Case(APPLY_ROPE.name, shape.name, _build(shape), outputs=("q_out", "k_out")) for shape in SHAPES),
    *(
        Case(APPLY_ROPE.name, shape.name, _build(shape), outputs=("q_out", "k_out"), bench=True)
        for shape in (Shape("64x32+8x128", 64, 32, 8, 128, 128, fused=True), Shape("4096x32+8x128", 4096, 32, 8, 128, 128))
    ),
    *(Case(MULTI_AXIS_COS_SIN.name, shape.name, _build_axes(shape), tolerance=_EXACT, dtypes=_FP32) for shape in AXES),
    Case(
        MULTI_AXIS_COS_SIN.name,
        "8192 tokens",
        _build_axes(Axes("bench", 8192, (24, 20, 20), interleaved=True)),
        tolerance=_EXACT,
        dtypes=_FP32,
        bench=True,
    ),
)
"""Every kernel of the family meets these."""

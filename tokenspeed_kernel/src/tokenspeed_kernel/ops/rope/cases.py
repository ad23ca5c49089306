"""Cases of the rope op: shapes, inputs made from a seed, tolerances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.rope.config import RopeConfig
from tokenspeed_kernel.ops.rope.contract import APPLY_ROPE
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


CASES: Final = (
    *(Case(APPLY_ROPE.name, shape.name, _build(shape), outputs=("q_out", "k_out")) for shape in SHAPES),
    *(
        Case(APPLY_ROPE.name, shape.name, _build(shape), outputs=("q_out", "k_out"), bench=True)
        for shape in (Shape("64x32+8x128", 64, 32, 8, 128, 128, fused=True), Shape("4096x32+8x128", 4096, 32, 8, 128, 128))
    ),
)
"""Every kernel of the family meets these."""

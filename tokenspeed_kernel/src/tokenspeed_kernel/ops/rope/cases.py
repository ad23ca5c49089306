"""Cases of the rope op: shapes, inputs made from a seed, tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.ops.rope.config import RopeConfig
from tokenspeed_kernel.ops.rope.frequencies import rope_cos_sin


@dataclass(frozen=True, slots=True)
class Case:
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


CASES: Final = (
    Case("one_token", 1),
    Case("no_token", 0),
    Case("odd_sizes", 7, 3, 1, 20, 20),
    Case("fused", 5, fused=True),
    Case("model_shape", 9, 9, 3, 64, 64, fused=True),
    Case("partial", 5, rotary_dim=6),
    Case("interleaved", 5, interleaved=True),
    Case("interleaved_partial", 5, 3, 3, 24, 12, interleaved=True, fused=True),
)

TOLERANCES: Final = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(case: Case, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Arguments of `apply_rope`, without outputs."""
    generator = torch.Generator().manual_seed(seed)
    num_heads = case.num_heads + 2 * case.num_kv_heads
    made = torch.randn((case.num_tokens, num_heads, case.head_dim), generator=generator, dtype=torch.float64)
    projection = made.to(device, dtype)
    q = projection[:, : case.num_heads]
    k = projection[:, case.num_heads : case.num_heads + case.num_kv_heads]
    config = RopeConfig(case.head_dim, case.rotary_dim)
    return {
        "q": q if case.fused else q.contiguous(),
        "k": k if case.fused else k.contiguous(),
        "positions": torch.randint(0, 500, (case.num_tokens,), generator=generator).to(device),
        "cos_sin_cache": rope_cos_sin(config, 500, device=device),
        "interleaved": case.interleaved,
    }

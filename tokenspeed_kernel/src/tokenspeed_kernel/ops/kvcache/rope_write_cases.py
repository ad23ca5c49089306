"""Cases of the rotation with the cache write: shapes, formats of the cache, layouts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.kvcache.contract import ROPE_WRITE_KV
from tokenspeed_kernel.ops.random_shapes import random_size
from tokenspeed_kernel.ops.rope.config import RopeConfig
from tokenspeed_kernel.ops.rope.frequencies import rope_cos_sin

__all__ = ["ROPE_WRITE_CASES", "RopeWrite", "random_rope_write"]

_MAX_POSITION: Final = 500
# A rotated number may lie so near to the middle between two numbers of a format that float32 and float64 round it to either: one
# step of fp8 (three bits of mantissa; below 2**-6 multiples of 2**-9) beside the usual tolerance of the others.
_TOLERANCE: Final = {torch.float8_e4m3fn: Tolerance(0.125, 2.0**-9)}


@dataclass(frozen=True, slots=True)
class RopeWrite:
    """Shapes of one call, and what the cache holds.

    Attributes:
        scales: "" for a cache of the tokens' dtype, "tensor" or "head" for fp8.
        pooled: keys and values of a page lie side by side in one pool.
        slots: the slot mapping, or None for random ones.
    """

    name: str
    num_tokens: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    num_pages: int = 6
    page_size: int = 4
    interleaved: bool = False
    scales: str = ""
    pooled: bool = False
    slots: tuple[int, ...] | None = None
    bench: bool = False

    def inputs(self, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of `rope_write_kv`, without output: q, k and v are slices of one projection, as an engine has them."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = torch.randn((self.num_tokens, num_heads + 2 * num_kv_heads, self.head_dim), generator=generator)
        q, k, v = torch.split(heads.to(device, dtype), [num_heads, num_kv_heads, num_kv_heads], dim=1)
        size = (self.num_pages, self.page_size, num_kv_heads, self.head_dim)
        stored = torch.float8_e4m3fn if self.scales else dtype
        caches = torch.randn((self.num_pages, 2, *size[1:]), generator=generator).to(device, torch.float32).to(stored)
        k_cache, v_cache = caches.unbind(1)
        slots = torch.randperm(self.num_pages * self.page_size, generator=generator)[: self.num_tokens]
        if self.slots is not None:
            slots = torch.tensor(self.slots, dtype=torch.int64)
        made = {
            "q": q,
            "k": k,
            "v": v,
            "positions": torch.randint(0, _MAX_POSITION, (self.num_tokens,), generator=generator).to(device),
            "cos_sin_cache": rope_cos_sin(RopeConfig(self.head_dim, self.rotary_dim), _MAX_POSITION, device=str(device)),
            "k_cache": k_cache if self.pooled else k_cache.contiguous(),
            "v_cache": v_cache if self.pooled else v_cache.contiguous(),
            "slot_mapping": slots.to(device),
            "interleaved": self.interleaved,
        }
        if self.scales:
            scales = torch.rand((2, num_kv_heads), generator=generator) * 0.03 + 0.01
            made["k_scale"], made["v_scale"] = (scales if self.scales == "head" else scales[:, 0]).to(device)
        return made

    def case(self) -> Case:
        """The op's case."""
        return Case(
            ROPE_WRITE_KV.name,
            self.name,
            self.inputs,
            outputs=("q_out",),
            tolerance=_TOLERANCE,
            mutated=("k_cache", "v_cache"),
            bench=self.bench,
        )


_SIZES: Final = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rotary_dim": 128, "page_size": 16}
_LLAMA: Final[dict[str, Any]] = {**_SIZES, "bench": True}
_SHAPES: Final = (
    RopeWrite("one token", 1),
    RopeWrite("no token", 0),
    RopeWrite("no page", 2, num_pages=0, slots=(0, -1)),
    RopeWrite("odd sizes", 7, 3, 1, 20, 20, 3, 5),
    RopeWrite("partial", 5, rotary_dim=6, pooled=True),
    RopeWrite("interleaved", 5, interleaved=True),
    RopeWrite("interleaved, partial", 5, 3, 3, 24, 12, interleaved=True),
    RopeWrite("model shape", 9, 9, 3, 64, 64, 3, 16, pooled=True),
    RopeWrite("outside", 6, slots=(-1, 24, 3, 2**40, -(2**62), 23)),
    RopeWrite("fp8", 9, scales="tensor"),
    RopeWrite("fp8, scale of each head", 9, 9, 3, 64, 64, 3, 16, scales="head", pooled=True),
    RopeWrite("fp8, interleaved, partial", 5, 3, 3, 24, 12, interleaved=True, scales="head"),
    RopeWrite("fp8, outside", 6, scales="tensor", slots=(-1, 24, 3, 2**40, -(2**62), 23)),
    RopeWrite("64 tokens 32+8x128", 64, num_pages=512, **_LLAMA),
    RopeWrite("4096 tokens 32+8x128", 4096, num_pages=512, **_LLAMA),
    RopeWrite("64 tokens 32+8x128, fp8", 64, num_pages=512, scales="tensor", **_LLAMA),
    RopeWrite("4096 tokens 32+8x128, fp8", 4096, num_pages=512, scales="tensor", **_LLAMA),
)
ROPE_WRITE_CASES: Final = tuple(shape.case() for shape in _SHAPES)
"""Every kernel of `rope_write_kv` meets these."""


def random_rope_write(rng: random.Random) -> Case:
    """A random case."""
    num_pages, page_size = rng.randint(0, 6), random_size(rng, 12)
    num_slots = num_pages * page_size
    num_tokens = rng.randint(0, min(num_slots, 30))
    slots = tuple(
        slot if rng.random() < 0.9 else rng.choice((-1, num_slots + 3)) for slot in rng.sample(range(num_slots), num_tokens)
    )
    head_dim = random_size(rng, 130, low=2, multiple=2)
    shape = RopeWrite(
        "random",
        num_tokens,
        rng.randint(1, 9),
        rng.randint(1, 4),
        head_dim,
        rng.choice((head_dim, random_size(rng, head_dim, low=2, multiple=2))),
        num_pages,
        page_size,
        interleaved=rng.random() < 0.5,
        scales=rng.choice(("", "", "tensor", "head")),
        pooled=rng.random() < 0.5,
        slots=slots,
    )
    sizes = f"{num_tokens}x{shape.num_heads}+{shape.num_kv_heads}x{head_dim} rotary {shape.rotary_dim} of {num_pages}x{page_size}"
    kind = f"{' interleaved' if shape.interleaved else ''}{f' fp8 {shape.scales}' if shape.scales else ''}"
    label = f"random {sizes}{kind} {rng.getrandbits(32):08x}"
    return Case(ROPE_WRITE_KV.name, label, shape.inputs, outputs=("q_out",), tolerance=_TOLERANCE, mutated=("k_cache", "v_cache"))

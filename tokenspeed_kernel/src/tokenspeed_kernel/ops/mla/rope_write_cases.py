"""Cases of the rotation with the write of latent rows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.mla.contract import ROPE_WRITE_MLA
from tokenspeed_kernel.ops.random_shapes import random_size
from tokenspeed_kernel.ops.rope.config import RopeConfig
from tokenspeed_kernel.ops.rope.frequencies import rope_cos_sin

__all__ = ["ROPE_WRITE_CASES", "RopeWrite", "random_rope_write"]

_MAX_POSITION: Final = 500


@dataclass(frozen=True, slots=True)
class RopeWrite:
    """Shapes of one call; ``strided`` takes every second layer of a pool and every second slot of a list."""

    name: str
    num_tokens: int
    num_heads: int = 4
    latent_dim: int = 32
    rope_dim: int = 8
    num_pages: int = 6
    page_size: int = 4
    interleaved: bool = False
    strided: bool = False
    slots: tuple[int, ...] | None = None
    bench: bool = False

    def inputs(self, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of `rope_write_mla`, without output: q_rope is the end of each query head, as an engine has it."""
        width = self.latent_dim + self.rope_dim
        q = torch.randn((self.num_tokens, self.num_heads, width), generator=generator).to(device, dtype)
        rows = torch.randn((self.num_tokens, width), generator=generator).to(device, dtype)
        cache = torch.randn((self.num_pages, self.page_size, width), generator=generator).to(device, dtype)
        slots = torch.randperm(self.num_pages * self.page_size, generator=generator)[: self.num_tokens]
        if self.slots is not None:
            slots = torch.tensor(self.slots, dtype=torch.int64)
        if self.strided:
            pool = torch.randn((self.num_pages, 2, self.page_size, width + 2), generator=generator).to(device, dtype)
            cache = pool[:, 1, :, 1:-1]
            slots = torch.stack((slots, slots.flip(0)), dim=1)[:, 0]
        return {
            "q_rope": q[:, :, self.latent_dim :],
            "k_rope": rows[:, self.latent_dim :],
            "latent": rows[:, : self.latent_dim],
            "positions": torch.randint(0, _MAX_POSITION, (self.num_tokens,), generator=generator).to(device),
            "cos_sin_cache": rope_cos_sin(RopeConfig(self.rope_dim, self.rope_dim), _MAX_POSITION, device=str(device)),
            "kv_cache": cache,
            "slot_mapping": slots.to(device),
            "interleaved": self.interleaved,
        }

    def case(self) -> Case:
        """The op's case."""
        return Case(ROPE_WRITE_MLA.name, self.name, self.inputs, outputs=("q_out",), mutated=("kv_cache",), bench=self.bench)


ROPE_WRITE_CASES: Final = tuple(
    shape.case()
    for shape in (
        RopeWrite("one token", 1),
        RopeWrite("no token", 0),
        RopeWrite("no page", 2, num_pages=0, slots=(0, -1)),
        RopeWrite("odd sizes", 9, 3, 37, 6, 3, 5),
        RopeWrite("interleaved", 7, interleaved=True),
        RopeWrite("512 + 64, interleaved", 5, 16, 512, 64, 2, 16, interleaved=True),
        RopeWrite("outside", 6, slots=(-1, 24, 3, 2**40, -(2**62), 23)),
        RopeWrite("strided", 7, strided=True),
        RopeWrite("64 tokens, 16 heads of 512 + 64", 64, 16, 512, 64, 128, 64, interleaved=True, bench=True),
        RopeWrite("4096 tokens, 16 heads of 512 + 64", 4096, 16, 512, 64, 128, 64, interleaved=True, bench=True),
    )
)
"""Every kernel of `rope_write_mla` meets these."""


def random_rope_write(rng: random.Random) -> Case:
    """A random case."""
    num_pages, page_size = rng.randint(0, 6), random_size(rng, 12)
    num_slots = num_pages * page_size
    num_tokens = rng.randint(0, min(num_slots, 30))
    slots = tuple(slot if rng.random() < 0.9 else num_slots + 3 for slot in rng.sample(range(num_slots), num_tokens))
    shape = RopeWrite(
        "random",
        num_tokens,
        rng.randint(1, 20),
        random_size(rng, 130),
        random_size(rng, 70, low=2, multiple=2),
        num_pages,
        page_size,
        interleaved=rng.random() < 0.5,
        strided=rng.random() < 0.3,
        slots=slots,
    )
    sizes = f"{num_tokens}x{shape.num_heads} {shape.latent_dim}+{shape.rope_dim} of {num_pages}x{page_size}"
    label = f"random {sizes} {rng.getrandbits(32):08x}"
    return Case(ROPE_WRITE_MLA.name, label, shape.inputs, outputs=("q_out",), mutated=("kv_cache",))

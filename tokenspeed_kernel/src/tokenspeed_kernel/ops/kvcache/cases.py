"""Cases of the cache write: shapes, and inputs made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.kvcache.contract import WRITE_KV


@dataclass(frozen=True, slots=True)
class Shape:
    """Shapes of one call; ``slots`` are the slot mapping, or None for random ones."""

    name: str
    num_tokens: int
    num_pages: int = 6
    page_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    slots: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name


SHAPES: Final = (
    Shape("one_token", 1),
    Shape("no_token", 0),
    Shape("no_page", 2, num_pages=0, slots=(0, -1)),
    Shape("whole_cache", 24),
    Shape("odd_sizes", 9, 3, 5, 3, 20),
    Shape("page_size_1", 3, 7, 1),
    Shape("model_shape", 13, 4, 16, 3, 64),
    Shape("outside", 6, slots=(-1, 24, 3, 2**40, -(2**62), 23)),
    Shape("all_outside", 3, slots=(-1, -2, 24)),
)


def inputs(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `write_kv`: k and v are slices of one projection, as an engine has them."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.num_kv_heads, shape.head_dim)
    made = torch.randn((shape.num_tokens, 4 * shape.num_kv_heads, shape.head_dim), generator=generator).to(device, dtype)
    caches = torch.randn((2, shape.num_pages, shape.page_size, *heads), generator=generator).to(device, cache_dtype or dtype)
    slots = torch.randperm(shape.num_pages * shape.page_size, generator=generator)[: shape.num_tokens]
    if shape.slots is not None:
        slots = torch.tensor(shape.slots, dtype=torch.int64)
    return {
        "k": made[:, 2 * shape.num_kv_heads : 3 * shape.num_kv_heads],
        "v": made[:, 3 * shape.num_kv_heads :],
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": slots.to(device),
    }


def _interleaved(made: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of a page side by side in one pool, and a page in front of it: the caches are not contiguous."""
    pool = torch.stack((made["k_cache"], made["v_cache"]), dim=1)
    pool = torch.cat((pool[:1], pool))[1:]
    return {**made, "k_cache": pool[:, 0], "v_cache": pool[:, 1]}


def _build(
    shape: Shape, cache_dtype: torch.dtype | None = None, *, interleaved: bool = False
) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        made = inputs(shape, dtype=dtype, cache_dtype=cache_dtype, device=str(device), seed=generator.initial_seed())
        return _interleaved(made) if interleaved else made

    return build


_CACHES: Final = ("k_cache", "v_cache")


def _moved_bytes(made: dict[str, Any], result: Any) -> int:
    """New keys and values are read and written once; nothing else of the pool is touched."""
    k, cache = made["k"], made["k_cache"]
    return int(2 * k.numel() * (k.element_size() + cache.element_size()) + 8 * len(made["slot_mapping"]))


CASES: Final = (
    *(Case(WRITE_KV.name, shape.name, _build(shape), outputs=(), mutated=_CACHES) for shape in SHAPES),
    *(
        Case(WRITE_KV.name, f"odd_sizes, {name} cache", _build(SHAPES[4], kept), outputs=(), mutated=_CACHES)
        for name, kept in (("fp32", torch.float32), ("fp16", torch.float16))
    ),
    Case(WRITE_KV.name, "interleaved pool", _build(SHAPES[4], interleaved=True), outputs=(), mutated=_CACHES),
    *(
        Case(
            WRITE_KV.name,
            shape.name,
            _build(shape),
            outputs=(),
            mutated=_CACHES,
            bench=True,
            moved_bytes=_moved_bytes,
        )
        for shape in (Shape("64 tokens 8x128", 64, 512, 16, 8, 128), Shape("4096 tokens 8x128", 4096, 512, 16, 8, 128))
    ),
)
"""Every kernel of the family meets these."""

"""Cases of the cache write: shapes, and inputs made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch


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
    shape: Shape, *, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Arguments of `write_kv`: k and v are slices of one projection, as an engine has them."""
    generator = torch.Generator().manual_seed(0)
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

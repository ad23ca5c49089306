"""Cases of the cache ops: shapes, and inputs made from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.kvcache.contract import COPY_PAGES, QUANTIZE_KV, TRANSFER_PAGES, WRITE_KV, WRITE_SCALED_KV
from tokenspeed_kernel.ops.kvcache.rope_write_cases import ROPE_WRITE_CASES


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


_FP8: Final = torch.float8_e4m3fn


def scaled_inputs(
    shape: Shape, *, by_head: bool = False, adversarial: bool = False, paged: bool = True
) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
    """Arguments of `write_scaled_kv`, or, not paged, of `quantize_kv`; adversarial: what fp8 cannot hold, ties, NaN."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        made = inputs(shape, dtype=dtype, cache_dtype=_FP8, device=str(device), seed=generator.initial_seed())
        scales = torch.rand((2, shape.num_kv_heads), generator=generator) * 0.03 + 0.01
        scales = scales if by_head else scales[:, 0]
        if adversarial:
            made["k"].copy_(torch.randn(made["k"].shape, generator=generator) * 2.0 ** -8)  # numbers below the least normal one
            special = torch.tensor([math.nan, math.inf, -math.inf, 464.0, -465.0, 1e30, 0.0, -0.0, 2.0**-10, 3 * 2.0**-10])
            count = min(len(special), made["v"].shape[-1])
            made["v"][..., :count] = special[:count].to(device, dtype)
            scales = torch.ones_like(scales)
        made["k_scale"], made["v_scale"] = (one.to(device) for one in scales)
        if not paged:
            for name in ("k_cache", "v_cache", "slot_mapping"):
                del made[name]
        return made

    return build


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one call, and the (source, destination) pairs."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    page: tuple[int, ...] = (4, 2, 16)
    num_pages: int = 8
    gap: int = 0
    dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int64
    bench: bool = False


_SWAP: Final = ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
PAGES: Final = (
    Pages("one pair", ((1, 6),)),
    Pages("no pair", ()),
    Pages("outside", ((-1, 2), (3, -1), (8, 4), (5, 8), (6, 2**31 - 1), (7, 0)), index_dtype=torch.int32),
    Pages("odd page", ((1, 6), (0, 5)), (3, 1, 7)),
    Pages("one byte", ((1, 6), (0, 5)), (1,), dtype=torch.uint8),
    Pages("numbers", ((1, 6), (0, 5)), ()),
    Pages("fp8 pages", ((1, 6), (7, 0)), (5, 3, 9), dtype=_FP8),
    Pages("pages apart", ((1, 6), (7, 0)), gap=3),
    Pages("large page", ((1, 2),), (64, 8, 128), 3),
)
OVERLAPPING: Final = (
    Pages("exchange and rotation", _SWAP),
    Pages("shift", tuple((page, page + 1) for page in range(7))),
    Pages("one source, many destinations", ((2, 0), (2, 1), (2, 7))),
    Pages("onto itself", ((3, 3),)),
)
_HALVES: Final = tuple((page, page + 256) for page in range(256))
_PAGES_BENCH: Final = Pages("256 pages of 16x8x128", _HALVES, (16, 8, 128), 512, bench=True)


def _pool(pages: Pages, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    dtype = pages.dtype or dtype
    size = math.prod(pages.page)
    made = torch.randint(0, 120, (pages.num_pages, size + pages.gap), generator=generator).to(torch.uint8)
    values = made.to(device) if dtype == torch.uint8 else made.to(device, torch.float32).to(dtype)
    return values[:, :size].unflatten(1, pages.page) if pages.page else values[:, 0]  # type: ignore[no-untyped-call]


def page_inputs(
    pages: Pages, *, transfer: bool = False
) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
    """Arguments of `copy_pages`, or of `transfer_pages` between two pools of the device."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        pairs = torch.tensor(pages.pairs, dtype=pages.index_dtype).reshape(-1, 2).to(device)
        lists = {"src_pages": pairs[:, 0], "dst_pages": pairs[:, 1]}
        if not transfer:
            return {"pool": _pool(pages, generator, device, dtype), **lists}
        pools = [_pool(one, generator, device, dtype) for one in (pages, replace(pages, gap=pages.gap and pages.gap + 2))]
        return {"src_pool": pools[0], "dst_pool": pools[1], **lists}

    return build


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
        )
        for shape in (Shape("64 tokens 8x128", 64, 512, 16, 8, 128), Shape("4096 tokens 8x128", 4096, 512, 16, 8, 128))
    ),
    *(
        Case(op, f"{shape.name}{', scale of each head' if by_head else ''}", scaled_inputs(shape, by_head=by_head, paged=paged),
             outputs=outputs, mutated=mutated)
        for op, paged, outputs, mutated in (
            (WRITE_SCALED_KV.name, True, (), _CACHES),
            (QUANTIZE_KV.name, False, ("k_out", "v_out"), ()),
        )
        for by_head in (False, True)
        for shape in SHAPES
    ),
    *(
        Case(op, f"beyond the range, ties, NaN{', scale of each head' if by_head else ''}",
             scaled_inputs(SHAPES[6], by_head=by_head, adversarial=True, paged=paged), outputs=outputs, mutated=mutated)
        for op, paged, outputs, mutated in (
            (WRITE_SCALED_KV.name, True, (), _CACHES),
            (QUANTIZE_KV.name, False, ("k_out", "v_out"), ()),
        )
        for by_head in (False, True)
    ),
    *(
        Case(op, f"4096 tokens 8x128{', scale of each head' if by_head else ''}",
             scaled_inputs(Shape("bench", 4096, 512, 16, 8, 128), by_head=by_head, paged=paged),
             outputs=outputs, mutated=mutated, bench=True)
        for op, paged, outputs, mutated in (
            (WRITE_SCALED_KV.name, True, (), _CACHES),
            (QUANTIZE_KV.name, False, ("k_out", "v_out"), ()),
        )
        for by_head in (False, True)
    ),
    *(
        Case(COPY_PAGES.name, pages.name, page_inputs(pages), outputs=(), mutated=("pool",), bench=pages.bench)
        for pages in (*PAGES, *OVERLAPPING, _PAGES_BENCH)
    ),
    *(
        Case(TRANSFER_PAGES.name, pages.name, page_inputs(pages, transfer=True), outputs=(), mutated=("dst_pool",),
             bench=pages.bench)
        for pages in (*PAGES, *OVERLAPPING, _PAGES_BENCH)
    ),
    *ROPE_WRITE_CASES,
)  # fmt: skip
"""Every kernel of the family meets these."""

"""What the cache ops are: operands, parameters and traits."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

_HEAD_DIM: Final = Trait("head_dim", "elements of one head")
_PAGE_SIZE: Final = Trait("page_size", "tokens in a page of the cache")

WRITE_KV: Final = OpContract(
    name="kvcache.write_kv",
    operands=("k", "v", "k_cache", "v_cache"),
    parameters=("k", "v", "k_cache", "v_cache", "slot_mapping"),
    traits=(_HEAD_DIM, _PAGE_SIZE),
    summary="write new keys and values into their slots of a paged cache",
    by_position=True,
)
WRITE_SCALED_KV: Final = OpContract(
    name="kvcache.write_scaled_kv",
    operands=("k", "v", "k_cache", "v_cache"),
    parameters=("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale"),
    traits=(_HEAD_DIM, _PAGE_SIZE),
    summary="divide new keys and values by their scales, and write them into an fp8 cache",
    by_position=True,
)
QUANTIZE_KV: Final = OpContract(
    name="kvcache.quantize_kv",
    operands=("k", "v", "k_out", "v_out"),
    parameters=("k", "v", "k_scale", "v_scale", "k_out", "v_out"),
    traits=(_HEAD_DIM,),
    summary="divide keys and values by their scales, and round them to fp8",
    by_position=True,
)
ROPE_WRITE_KV: Final = OpContract(
    name="kvcache.rope_write_kv",
    operands=("q", "k", "v", "cos_sin_cache", "k_cache", "v_cache"),
    parameters=(
        *("q", "k", "v", "positions", "cos_sin_cache", "k_cache", "v_cache", "slot_mapping"),
        *("interleaved", "k_scale", "v_scale", "q_out"),
    ),
    traits=(
        _HEAD_DIM,
        Trait("rotary_dim", "leading elements of a head that are rotated"),
        Trait("interleaved", "a pair is two neighbours, not the same place in two halves"),
        _PAGE_SIZE,
    ),
    summary="rotate new queries and keys, and write keys and values, in fp8 too, into their slots of a paged cache",
    by_position=True,
)
COPY_PAGES: Final = OpContract(
    name="kvcache.copy_pages",
    operands=("pool",),
    parameters=("pool", "src_pages", "dst_pages", "scratch"),
    summary="copy pages to other pages of the same pool, all at once",
    by_position=True,
)
TRANSFER_PAGES: Final = OpContract(
    name="kvcache.transfer_pages",
    operands=("src_pool", "dst_pool"),
    parameters=("src_pool", "dst_pool", "src_pages", "dst_pages"),
    summary="copy pages from one pool to another, of the device or of the host",
    by_position=True,
)

CONTRACTS: Final = (WRITE_KV, WRITE_SCALED_KV, QUANTIZE_KV, ROPE_WRITE_KV, COPY_PAGES, TRANSFER_PAGES)

_FLOATS: Final = ("fp32", "bf16", "fp16")
SCALED_FORMATS: Final = {
    op: tuple(
        Signature.of(**dict.fromkeys(("k", "v"), new), **dict.fromkeys(stored, f"fp8_e4m3@{layout}"))
        for new in _FLOATS
        for layout in ("tensor", "head")
    )
    for op, stored in ((WRITE_SCALED_KV.name, ("k_cache", "v_cache")), (QUANTIZE_KV.name, ("k_out", "v_out")))
}
"""Formats that the CPU and Triton kernels take: one scale for the tensor, or one for each key and value head."""


def rope_write_formats(floats: tuple[str, ...]) -> tuple[Signature, ...]:
    """Formats of `rope_write_kv`: a cache of the tokens' own dtype, or fp8 of what is narrower than fp64."""
    names = ("q", "k", "v")
    return tuple(
        Signature.of(**dict.fromkeys(names, new), cos_sin_cache="fp32", k_cache=kept, v_cache=kept)
        for new in floats
        for kept in (new, *(f"fp8_e4m3@{layout}" for layout in ("tensor", "head") if new != "fp64"))
    )

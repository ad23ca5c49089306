"""Batches of the attention ops: shapes and options, and inputs made from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch.

    Attributes:
        name: says what is special about it.
        query_lens, seq_lens: queries and keys of each request.
        num_heads, num_kv_heads, head_dim, page_size: shapes; page_size is not used by prefill.
        causal, sliding_window, logit_cap, sinks, softmax_scale: options.
        fp8: the caches hold fp8_e4m3 numbers that stand for themselves; paged alone.
        missing_pages: (request, page index) entries of the page table that are invalid.
        consecutive: whether a request's pages follow each other in the cache.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    causal: bool = True
    sliding_window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    softmax_scale: float | None = None
    fp8: bool = False
    missing_pages: tuple[tuple[int, int], ...] = ()
    consecutive: bool = False

    def __str__(self) -> str:
        return self.name


DECODE_BATCHES: Final = (
    Batch("one_key", (1,), (1,)),
    Batch("no_request", (), ()),
    Batch("no_key", (1, 1, 1), (0, 3, 0)),
    Batch("unequal_lengths", (1,) * 6, (1, 30, 7, 8, 9, 64)),
    Batch("page_size_1", (1, 1), (5, 19), page_size=1),
    Batch("page_size_16", (1, 1, 1), (16, 17, 33), page_size=16),
    Batch("page_size_5", (1, 1), (5, 12), page_size=5),
    Batch("page_size_64", (1,), (70,), page_size=64),
    Batch("many_groups", (1,) * 4, (2000, 3, 700, 4), num_heads=2, num_kv_heads=1),
    Batch("single_head", (1, 1), (9, 4), num_heads=1, num_kv_heads=1),
    Batch("every_head_own_keys", (1, 1), (9, 4), num_heads=3, num_kv_heads=3),
    Batch("grouped_3", (1, 1), (9, 4), num_heads=9, num_kv_heads=3, head_dim=64),
    Batch("head_dim_odd", (1, 1), (9, 4), head_dim=20),
    Batch("window", (1, 1, 1), (21, 3, 8), sliding_window=5),
    Batch("window_1", (1, 1), (21, 3), sliding_window=1),
    Batch("cap", (1, 1), (9, 4), logit_cap=2.0),
    Batch("sinks", (1, 1, 1), (9, 0, 4), sinks=True),
    Batch("everything", (1, 1, 1), (9, 0, 14), sinks=True, logit_cap=3.0, sliding_window=6),
    Batch("scale", (1, 1), (9, 4), softmax_scale=0.7),
    Batch("fp8", (1, 1, 1), (9, 0, 40), fp8=True),
    Batch("missing_page", (1, 1), (11, 9), missing_pages=((0, 0), (1, 1))),
    Batch("missing_last_page", (1, 1), (11, 9), missing_pages=((0, 2),)),
    Batch("missing_all_pages", (1, 1), (7, 9), missing_pages=((0, 0), (0, 1))),
    Batch("missing_page_window", (1, 1), (11, 9), missing_pages=((0, 2),), sliding_window=3),
    # Sizes and options that libraries and kernels for one device take.
    Batch("small_page_16_d64_cap", (1,) * 3, (33, 0, 50), 4, 2, 64, 16, logit_cap=5.0),
    Batch("small_page_16_d64", (1,) * 4, (33, 0, 150, 1), 4, 2, 64, 16, logit_cap=5.0, sinks=True, missing_pages=((2, 3),)),
    Batch("small_page_64_d128", (1,) * 3, (70, 0, 200), 6, 2, 128, 64, sliding_window=90, sinks=True),
)

EXTEND_BATCHES: Final = (
    Batch("from_nothing", (7,), (7,)),
    Batch("no_request", (), ()),
    Batch("over_cached", (5, 3), (17, 30)),
    Batch("mixed", (1, 1, 1, 9, 4), (5, 40, 12, 9, 23)),
    Batch("no_query", (0, 3, 0), (5, 8, 0)),
    Batch("consecutive", (1, 6), (9, 22), consecutive=True),
    Batch("more_queries_than_keys", (6, 4, 3), (2, 0, 3)),
    Batch("page_size_1", (4, 1), (9, 6), page_size=1),
    Batch("page_size_16", (20,), (50,), page_size=16),
    Batch("page_size_5", (6, 2), (13, 11), page_size=5),
    Batch("several_tiles", (150,), (190,), num_heads=2, num_kv_heads=1, page_size=16),
    Batch("grouped_3", (5,), (12,), num_heads=9, num_kv_heads=3, head_dim=64),
    Batch("head_dim_odd", (5,), (9,), head_dim=20),
    Batch("not_causal", (5, 3), (9, 8), causal=False),
    Batch("window", (9, 1, 4), (30, 21, 4), sliding_window=5),
    Batch("window_1", (9,), (12,), sliding_window=1),
    Batch("window_several_tiles", (150,), (190,), num_heads=2, num_kv_heads=1, page_size=16, sliding_window=37),
    Batch("cap", (5, 1), (9, 8), logit_cap=2.0),
    Batch("sinks", (5, 1, 3), (9, 8, 2), sinks=True),
    Batch("everything", (9, 1, 4), (30, 21, 2), sinks=True, logit_cap=3.0, sliding_window=6),
    Batch("scale", (5, 1), (9, 8), softmax_scale=0.7),
    Batch("fp8", (5, 1), (9, 40), fp8=True),
    Batch("missing_page", (5, 1, 6), (11, 9, 6), missing_pages=((0, 1), (1, 0), (2, 0))),
    Batch("missing_page_window", (5, 6), (11, 13), missing_pages=((0, 1), (1, 2)), sliding_window=3),
    Batch("missing_all_pages", (3, 2), (7, 9), missing_pages=((0, 0), (0, 1))),
    # Sizes and options that libraries take.
    Batch("small_d64", (5, 1, 7, 7, 3), (9, 40, 7, 7, 2), head_dim=64, page_size=16),
    Batch("small_d64_cap", (6, 2), (20, 9), head_dim=64, page_size=16, logit_cap=4.0),
    Batch("small_d128_not_causal", (6, 6), (9, 9), head_dim=128, page_size=16, causal=False),
)

_PAGED_ONLY: Final = ("fp8", "page_size_1", "page_size_16", "page_size_5", "consecutive")
PREFILL_BATCHES: Final = (
    *(batch for batch in EXTEND_BATCHES if not batch.missing_pages and batch.name not in _PAGED_ONLY),
    Batch("keys_of_another", (2, 3), (7, 3), causal=False),
)

# Larger shapes, for devices: (queries, keys) of each request as an engine has them.
DEVICE_DECODE_BATCHES: Final = tuple(
    Batch(f"page_{page}_d{dim}", (1,) * 7, (4096, 1, 17, 1000, 63, 64, 2049), 32, 8, dim, page)
    for page in (16, 64)
    for dim in (64, 128)
)
DEVICE_EXTEND_BATCHES: Final = (
    *(
        Batch(f"page_{page}_d{dim}", (512, 1, 33, 200, 1), (4096, 100, 33, 500, 2000), 32, 8, dim, page)
        for page in (16, 64)
        for dim in (64, 128)
    ),
    Batch("window_1024", (700, 1), (3000, 2500), 32, 8, 128, 16, sliding_window=1024),
    Batch("sinks_cap", (300, 1), (900, 800), 32, 8, 128, 16, sinks=True, logit_cap=30.0),
)
DEVICE_PREFILL_BATCHES: Final = (
    Batch("two_requests", (1000, 300), (1000, 300), 32, 8, 128),
    Batch("heads_12_4_d96", (333, 90), (333, 200), 12, 4, 96),
)

# Largest absolute error allowed on outputs of unit scale; float64 is compared with the float64 reference.
TOLERANCES: Final = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def paged_inputs(
    batch: Batch, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, poison: bool = True
) -> dict[str, Any]:
    """Arguments of `mha_extend` (drop cu_seqlens_q and max_seqlen_q for `mha_decode`), without out and return_lse.

    Pages are dealt at random; with ``poison`` everything in the cache that no request owns is NaN, as are the tails of last pages
    and the pages whose entries in the table are invalid.
    """
    generator = torch.Generator().manual_seed(seed)
    pages_of = [math.ceil(length / batch.page_size) for length in batch.seq_lens]
    num_pages = sum(pages_of) + 3
    heads = (batch.num_kv_heads, batch.head_dim)
    deal = torch.arange(num_pages) if batch.consecutive else torch.randperm(num_pages, generator=generator)
    table = torch.full((len(pages_of), max([*pages_of, 1]) + 1), -1, dtype=torch.int32)
    filler = math.nan if poison else 0.0
    caches = [torch.full((num_pages, batch.page_size, *heads), filler, dtype=torch.float64) for _ in range(2)]
    start = 1
    for request, (count, length) in enumerate(zip(pages_of, batch.seq_lens, strict=True)):
        own = deal[start : start + count]
        start += count
        table[request, :count] = own.to(torch.int32)
        for cache in caches:
            tokens = torch.randn((length, *heads), generator=generator, dtype=torch.float64)
            for index, page in enumerate(own.tolist()):
                part = tokens[index * batch.page_size : (index + 1) * batch.page_size]
                cache[page, : len(part)] = part
    for place, (request, index) in enumerate(batch.missing_pages):
        for cache in caches:
            cache[int(table[request, index])] = filler
        table[request, index] = (-1, num_pages, 2**31 - 1, -(2**31))[place % 4]
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn((sum(batch.query_lens), batch.num_heads, batch.head_dim), generator=generator, dtype=torch.float64)
    return {
        "q": q.to(device, dtype),
        # By way of float32, from which fp8 keeps NaN.
        "k_cache": caches[0].to(device, torch.float32 if batch.fp8 else dtype).to(torch.float8_e4m3fn if batch.fp8 else dtype),
        "v_cache": caches[1].to(device, torch.float32 if batch.fp8 else dtype).to(torch.float8_e4m3fn if batch.fp8 else dtype),
        "page_table": table.to(device),
        "cu_seqlens_q": starts.to(device),
        "seq_lens": torch.tensor(batch.seq_lens, dtype=torch.int32).to(device),
        "max_seqlen_q": max([*batch.query_lens, 0]),
        "max_seqlen_k": max([*batch.seq_lens, 0]),
        **_options(batch, generator, device),
    }


def decode_inputs(
    batch: Batch, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, poison: bool = True
) -> dict[str, Any]:
    """Arguments of `mha_decode`, without out and return_lse; see `paged_inputs`."""
    inputs = paged_inputs(batch, dtype=dtype, device=device, seed=seed, poison=poison)
    return {name: value for name, value in inputs.items() if name not in ("cu_seqlens_q", "max_seqlen_q", "causal")}


def ragged_inputs(batch: Batch, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Arguments of `mha_prefill`, without out and return_lse."""
    generator = torch.Generator().manual_seed(seed)

    def values(num_tokens: int, num_heads: int) -> torch.Tensor:
        made = torch.randn((num_tokens, num_heads, batch.head_dim), generator=generator, dtype=torch.float64)
        return made.to(device, dtype)

    def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    return {
        "q": values(sum(batch.query_lens), batch.num_heads),
        "k": values(sum(batch.seq_lens), batch.num_kv_heads),
        "v": values(sum(batch.seq_lens), batch.num_kv_heads),
        "cu_seqlens_q": offsets(batch.query_lens),
        "cu_seqlens_k": offsets(batch.seq_lens),
        "max_seqlen_q": max([*batch.query_lens, 0]),
        "max_seqlen_k": max([*batch.seq_lens, 0]),
        **_options(batch, generator, device),
    }


def _options(batch: Batch, generator: torch.Generator, device: str) -> dict[str, Any]:
    sinks = torch.randn(batch.num_heads, generator=generator).to(device) if batch.sinks else None
    return {
        "causal": batch.causal,
        "sliding_window": batch.sliding_window,
        "logit_cap": batch.logit_cap,
        "sinks": sinks,
        "softmax_scale": batch.softmax_scale,
    }

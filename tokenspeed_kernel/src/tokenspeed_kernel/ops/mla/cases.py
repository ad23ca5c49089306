"""Cases of the latent attention ops: shapes and options, inputs made from a seed. They feed tests and timings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.mla.contract import MLA_DECODE, MLA_EXTEND, MLA_PREFILL
from tokenspeed_kernel.ops.mla.packed import pack_rows
from tokenspeed_kernel.ops.mla.rope_write_cases import ROPE_WRITE_CASES
from tokenspeed_kernel.ops.mla.write_cases import WRITE_CASES

__all__ = [
    "CASES",
    "DECODE_BATCHES",
    "EXTEND_BATCHES",
    "PREFILL_BATCHES",
    "ExpandedBatch",
    "LatentBatch",
    "decode_inputs",
    "expanded_inputs",
    "extend_inputs",
    "latent_pool",
]

_HEAVY: Final = 24.0
_TOLERANCE: Final = {torch.float64: Tolerance(1e-11, 1e-11)}
"""The host's kernels compute float64 operands in float64, as the reference does."""


@dataclass(frozen=True, slots=True)
class LatentBatch:
    """One batch over a paged latent cache.

    Attributes:
        name: says what is special about it.
        query_lens, seq_lens: queries and keys of each request.
        num_heads, latent_dim, rope_dim, page_size: shapes.
        causal: option.
        missing_pages: (request, page index) entries of the page table that are invalid.
        heavy: for each request the position of a key that outweighs all others together, so that losing it shows; -1 for none.
        strided: queries, cache and page table are parts of larger tensors.
        pool_pages: pages of a cache that requests share; 0 gives each its own, and NaN to whatever no request owns.
        packed: the cache is of packed rows, fp8.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    latent_dim: int = 32
    rope_dim: int = 16
    page_size: int = 4
    causal: bool = True
    missing_pages: tuple[tuple[int, int], ...] = ()
    heavy: tuple[int, ...] = ()
    strided: bool = False
    pool_pages: int = 0
    packed: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class ExpandedBatch:
    """One batch over ragged expanded keys; attributes as of `LatentBatch`."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 24
    v_head_dim: int = 16
    causal: bool = True
    softmax_scale: float | None = None
    heavy: tuple[int, ...] = ()
    strided: bool = False

    def __str__(self) -> str:
        return self.name


# Ends of pages (4 and 64 tokens), of key tiles (16, 32, 64) and of splits, and both ends of the request.
_BORDERS: Final = (0, 3, 4, 15, 16, 31, 32, 63, 64, 127, 128, 191, 192, 255, 256, 298, 299)

DECODE_BATCHES: Final = (
    LatentBatch("one_key", (1,), (1,)),
    LatentBatch("no_request", (), ()),
    LatentBatch("no_key", (1, 1, 1), (0, 3, 0)),
    LatentBatch("unequal_lengths", (1,) * 6, (1, 30, 7, 8, 9, 64)),
    LatentBatch("two_queries", (2,) * 4, (5, 2, 40, 17)),
    LatentBatch("four_queries", (4,) * 3, (4, 33, 70)),
    LatentBatch("four_queries_not_causal", (4,) * 3, (4, 33, 70), causal=False),
    LatentBatch("more_queries_than_keys", (5, 5, 5), (2, 0, 5)),
    LatentBatch("page_size_1", (1, 1), (5, 19), page_size=1),
    LatentBatch("page_size_5", (3, 3), (5, 32), page_size=5),
    LatentBatch("page_size_16", (1, 1, 1), (16, 17, 33), page_size=16),
    LatentBatch("page_size_64", (2,), (70,), page_size=64),
    LatentBatch("one_head", (1, 1), (9, 40), num_heads=1),
    LatentBatch("three_heads", (3, 3), (9, 40), num_heads=3),
    LatentBatch("heads_16", (2,), (40,), num_heads=16),
    LatentBatch("heads_20_in_two_tiles", (4,), (40,), num_heads=20),
    LatentBatch("odd_dims", (2, 2), (9, 40), latent_dim=20, rope_dim=6),
    LatentBatch("rope_of_1", (1,), (9,), latent_dim=1, rope_dim=1),
    LatentBatch("latent_512_rope_64", (1, 1), (70, 3), num_heads=16, latent_dim=512, rope_dim=64, page_size=64),
    LatentBatch("latent_448_rope_64", (2,), (40,), num_heads=8, latent_dim=448, rope_dim=64, page_size=16),
    LatentBatch("many_keys", (1, 1), (1500, 3)),
    LatentBatch("missing_page", (2, 2), (11, 9), missing_pages=((0, 0), (1, 1))),
    LatentBatch("missing_last_page", (1, 1), (11, 9), missing_pages=((0, 2),)),
    LatentBatch("missing_all_pages", (2, 2), (7, 9), missing_pages=((0, 0), (0, 1))),
    LatentBatch("strided", (2, 2), (11, 23), strided=True),
    LatentBatch("heavy_keys", (1,) * len(_BORDERS), (300,) * len(_BORDERS), num_heads=2, heavy=_BORDERS),
    LatentBatch("heavy_keys_page_64", (2,) * 5, (300,) * 5, num_heads=2, page_size=64, heavy=(0, 63, 64, 255, 298)),
    LatentBatch("packed", (1, 1, 1), (9, 0, 40), latent_dim=128, packed=True),
    LatentBatch("latent_512_rope_64_packed", (2,), (70,), 16, 512, 64, 64, packed=True),
    LatentBatch("packed_strided", (2, 2), (11, 23), latent_dim=384, rope_dim=6, page_size=5, strided=True, packed=True),
    LatentBatch("packed_missing_page", (2, 2), (11, 9), latent_dim=128, missing_pages=((0, 0), (1, 1)), packed=True),
    LatentBatch("heavy_keys_packed", (1,) * 3, (70,) * 3, 2, 128, 16, 64, heavy=(0, 63, 69), packed=True),
    LatentBatch("packed_no_request", (), (), latent_dim=128, packed=True),
)

EXTEND_BATCHES: Final = (
    LatentBatch("from_nothing", (7,), (7,)),
    LatentBatch("no_request", (), ()),
    LatentBatch("over_cached", (5, 3), (17, 30)),
    LatentBatch("mixed", (1, 1, 1, 9, 4), (5, 40, 12, 9, 23)),
    LatentBatch("no_query", (0, 3, 0), (5, 8, 0)),
    LatentBatch("no_token", (0, 0), (5, 8)),
    LatentBatch("more_queries_than_keys", (6, 4, 3), (2, 0, 3)),
    LatentBatch("not_causal", (5, 3), (9, 8), causal=False),
    LatentBatch("page_size_1", (4, 1), (9, 6), page_size=1),
    LatentBatch("page_size_5", (6, 2), (13, 11), page_size=5),
    LatentBatch("page_size_16", (20,), (50,), page_size=16),
    LatentBatch("several_tiles", (60, 2), (90, 2), num_heads=3, page_size=16),
    LatentBatch("odd_dims", (5, 2), (9, 30), latent_dim=20, rope_dim=6),
    LatentBatch("latent_512_rope_64", (3, 1), (20, 33), num_heads=4, latent_dim=512, rope_dim=64, page_size=16),
    LatentBatch("missing_page", (5, 1, 6), (11, 9, 6), missing_pages=((0, 1), (1, 0), (2, 0))),
    LatentBatch("missing_all_pages", (3, 2), (7, 9), missing_pages=((0, 0), (0, 1))),
    LatentBatch("strided", (3, 1), (11, 23), strided=True),
    LatentBatch("heavy_keys", (2, 3, 1, 2, 1), (300,) * 5, num_heads=2, heavy=(0, 32, 63, 127, 299)),
    LatentBatch("packed", (5, 1, 6), (17, 9, 6), latent_dim=128, missing_pages=((0, 1),), packed=True),
    LatentBatch("latent_512_rope_64_packed", (3, 1), (20, 33), 4, 512, 64, 16, packed=True),
)

PREFILL_BATCHES: Final = (
    ExpandedBatch("from_nothing", (7,), (7,)),
    ExpandedBatch("no_request", (), ()),
    ExpandedBatch("over_cached", (5, 3), (17, 30)),
    ExpandedBatch("mixed", (1, 1, 1, 9, 4), (5, 40, 12, 9, 23)),
    ExpandedBatch("no_query", (0, 3, 0), (5, 8, 0)),
    ExpandedBatch("more_queries_than_keys", (6, 4, 3), (2, 0, 3)),
    ExpandedBatch("not_causal", (5, 3), (9, 8), causal=False),
    ExpandedBatch("cached_part_without_keys", (5, 3), (0, 8), causal=False),
    ExpandedBatch("several_tiles", (150, 3), (190, 3)),
    ExpandedBatch("head_dim_192_v_128", (20, 5), (20, 70), head_dim=192, v_head_dim=128),
    ExpandedBatch("head_dim_96_v_128", (9,), (20,), head_dim=96, v_head_dim=128),
    ExpandedBatch("head_dim_100_v_72", (9,), (20,), head_dim=100, v_head_dim=72),
    ExpandedBatch("v_wider", (9,), (20,), head_dim=16, v_head_dim=80),
    ExpandedBatch("one_element", (3,), (5,), head_dim=1, v_head_dim=1),
    ExpandedBatch("grouped", (9, 4), (20, 4), num_heads=6),
    ExpandedBatch("one_key_head", (9, 4), (20, 4), num_heads=4, num_kv_heads=1),
    ExpandedBatch("scale", (9,), (20,), softmax_scale=0.5),
    ExpandedBatch("strided", (9, 4), (20, 4), strided=True),
    ExpandedBatch("heavy_keys", (2, 3, 1, 2, 1), (300,) * 5, heavy=(0, 32, 63, 127, 299)),
)

# Larger shapes, for devices. Requests share a pool of pages where each having its own would only take memory.
_DIMS: Final = (512, 64)
DEVICE_DECODE_BATCHES: Final = (
    LatentBatch("b1_kv65536_q4_h16", (4,), (65536,), 16, *_DIMS, 64),
    LatentBatch("b1_kv8192_q1_h16", (1,), (8192,), 16, *_DIMS, 64),
    LatentBatch("b64_kv8192_q1_h16", (1,) * 64, (8192,) * 64, 16, *_DIMS, 64, pool_pages=512),
    LatentBatch("b8_kv2000_q4_h128", (4,) * 8, (2000, 1, 64, 63, 65, 1999, 7, 0), 128, *_DIMS, 64),
    LatentBatch(
        "b7_page16_h64", (2,) * 7, (4096, 2, 17, 1000, 63, 64, 2049), 64, *_DIMS, 16, heavy=(4094, 0, 15, 998, 31, 32, 2047)
    ),
)
DEVICE_PACKED_BATCHES: Final = (
    LatentBatch("b1_kv65536_q1_h16_packed", (1,), (65536,), 16, *_DIMS, 64, packed=True),
    LatentBatch("b64_kv8192_q1_h16_packed", (1,) * 64, (8192,) * 64, 16, *_DIMS, 64, pool_pages=512, packed=True),
)
DEVICE_EXTEND_BATCHES: Final = (
    LatentBatch("chunk_h16", (512, 1, 33, 200, 1), (4096, 100, 33, 500, 2000), 16, *_DIMS, 64),
    LatentBatch("chunk_h128_page16", (100, 1), (900, 800), 128, *_DIMS, 16),
)
DEVICE_PREFILL_BATCHES: Final = (
    ExpandedBatch("two_requests_h16", (1000, 300), (1000, 300), 16, 16, 192, 128),
    ExpandedBatch("over_cached_h128", (200, 60), (333, 200), 128, 128, 192, 128),
    ExpandedBatch("cached_part_h16", (500, 60), (2000, 333), 16, 16, 192, 128, causal=False),
)


def latent_pool(batch: LatentBatch, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 cache and its page table. Pages are dealt at random; what no request owns is NaN (see `LatentBatch.pool_pages`)."""
    page_size, width = batch.page_size, batch.latent_dim + batch.rope_dim
    pages_of = [-(-length // page_size) for length in batch.seq_lens]
    table = torch.full((len(pages_of), max([*pages_of, 1]) + 1), -1, dtype=torch.int32)
    if batch.pool_pages:
        cache = torch.randn((batch.pool_pages, page_size, width), generator=generator)
        for request, count in enumerate(pages_of):
            table[request, :count] = torch.randint(batch.pool_pages, (count,), generator=generator, dtype=torch.int32)
        return cache, table
    num_pages = sum(pages_of) + 3
    cache = torch.full((num_pages, page_size, width), math.nan)
    deal, start = torch.randperm(num_pages, generator=generator), 1
    for request, (count, length) in enumerate(zip(pages_of, batch.seq_lens, strict=True)):
        own = deal[start : start + count]
        start += count
        table[request, :count] = own.to(torch.int32)
        positions = torch.arange(length)
        rows = torch.randn((length, width), generator=generator)
        if batch.heavy and batch.heavy[request] >= 0:
            rows[batch.heavy[request], 0] = _HEAVY
        cache[own[positions // page_size], positions % page_size] = rows
    for place, (request, index) in enumerate(batch.missing_pages):
        cache[int(table[request, index])] = math.nan
        table[request, index] = (-1, num_pages, 2**31 - 1, -(2**31))[place % 4]
    return cache, table


def _packed(batch: LatentBatch, cache: torch.Tensor) -> torch.Tensor:
    """The cache in packed rows; NaN in all parts of rows that are NaN."""
    rows = cache.flatten(0, 1)
    packed = pack_rows(rows[:, : batch.latent_dim], rows[:, batch.latent_dim :])
    packed[rows[:, 0].isnan()] = 255
    return packed.view(*cache.shape[:2], packed.shape[1])


def _paged_inputs(
    batch: LatentBatch, generator: torch.Generator, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, Any]:
    width = batch.latent_dim + batch.rope_dim
    cache, table = latent_pool(batch, generator)
    q = torch.randn((*shape, batch.num_heads, width), generator=generator)
    if batch.heavy:
        q[..., 0] = 4.0  # every head looks for the heavy key
    q, table = q.to(device, dtype), table.to(device)
    cache = _packed(batch, cache).to(device) if batch.packed else cache.to(device, dtype)
    seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=device)
    if batch.strided:
        wide = torch.full((*shape, batch.num_heads + 3, width + 5), math.nan, device=device, dtype=dtype)
        wide[..., 1:-2, :width] = q
        around = (len(cache), 2, batch.page_size, cache.shape[2] + 8)
        pool = torch.full(around, 255 if batch.packed else math.nan, device=device, dtype=cache.dtype)
        pool[:, 1, :, 4:-4] = cache
        columns = torch.full((len(table), table.shape[1], 2), -7, device=device, dtype=torch.int32)
        columns[..., 0] = table
        q, cache, table = wide[..., 1:-2, :width], pool[:, 1, :, 4:-4], columns[..., 0]
        seq_lens = torch.stack((seq_lens, torch.zeros_like(seq_lens)), 1)[:, 0]
    return {
        "q": q,
        "kv_cache": cache,
        "page_table": table,
        "seq_lens": seq_lens,
        "max_seqlen_k": max([*batch.seq_lens, 0]),
        "softmax_scale": width**-0.5,
        "latent_dim": batch.latent_dim,
        "causal": batch.causal,
    }


def decode_inputs(
    batch: LatentBatch, generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of `mla_decode`, without out and return_lse; the batch's requests have equal numbers of queries."""
    lengths = set(batch.query_lens) or {1}
    assert len(lengths) == 1, batch
    return _paged_inputs(batch, generator, device, dtype, (len(batch.query_lens), *lengths))


def extend_inputs(
    batch: LatentBatch, generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of `mla_extend`, without out and return_lse."""
    made = _paged_inputs(batch, generator, device, dtype, (sum(batch.query_lens),))
    made["cu_seqlens_q"] = _offsets(batch.query_lens, device)
    made["max_seqlen_q"] = max([*batch.query_lens, 0])
    return made


def expanded_inputs(
    batch: ExpandedBatch, generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of `mla_prefill`, without out and return_lse."""
    num_keys, head_dim, v_head_dim = sum(batch.seq_lens), batch.head_dim, batch.v_head_dim
    q = torch.randn((sum(batch.query_lens), batch.num_heads, head_dim), generator=generator)
    k = torch.randn((num_keys, batch.num_kv_heads, head_dim), generator=generator)
    v = torch.randn((num_keys, batch.num_kv_heads, v_head_dim), generator=generator)
    if batch.heavy:
        q[..., 0] = 4.0
        starts = torch.tensor([0, *batch.seq_lens]).cumsum(0)
        for start, position in zip(starts.tolist(), batch.heavy, strict=False):
            k[start + position, :, 0] = _HEAVY
    q, k, v = (one.to(device, dtype) for one in (q, k, v))
    if batch.strided:  # keys and values beside each other, as one projection gives them
        wide = torch.full((*k.shape[:2], head_dim + v_head_dim), math.nan, device=device, dtype=dtype)
        wide[..., :head_dim], wide[..., head_dim:] = k, v
        k, v = wide[..., :head_dim], wide[..., head_dim:]
        heads = torch.full((q.shape[0], q.shape[1] + 2, head_dim), math.nan, device=device, dtype=dtype)
        heads[:, 1:-1] = q
        q = heads[:, 1:-1]
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": _offsets(batch.query_lens, device),
        "cu_seqlens_k": _offsets(batch.seq_lens, device),
        "max_seqlen_q": max([*batch.query_lens, 0]),
        "max_seqlen_k": max([*batch.seq_lens, 0]),
        "softmax_scale": batch.softmax_scale,
        "causal": batch.causal,
    }


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


_Make = Callable[..., dict[str, Any]]
_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def _cases(op: str, batches: tuple[Any, ...], make: _Make, *, bench: bool = False) -> list[Case]:
    def build(batch: Any, return_lse: bool) -> _Build:
        def made(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
            inputs = make(batch, generator, device, dtype)
            return {**inputs, "return_lse": True} if return_lse else inputs

        return made

    def case(batch: Any, return_lse: bool) -> Case:
        # The LSE has no output argument: those cases are run without given outputs.
        return Case(
            op,
            f"{batch.name} lse" if return_lse else batch.name,
            build(batch, return_lse),
            outputs=() if return_lse else ("out",),
            tolerance=_TOLERANCE,
            bench=bench,
        )

    plain = [case(batch, False) for batch in batches]
    return plain if bench else plain + [case(batch, True) for batch in batches]


CASES: Final = (
    *_cases(MLA_DECODE.name, DECODE_BATCHES, decode_inputs),
    *_cases(MLA_EXTEND.name, EXTEND_BATCHES, extend_inputs),
    *_cases(MLA_PREFILL.name, PREFILL_BATCHES, expanded_inputs),
    *_cases(MLA_DECODE.name, (*DEVICE_DECODE_BATCHES, *DEVICE_PACKED_BATCHES), decode_inputs, bench=True),
    *_cases(MLA_EXTEND.name, DEVICE_EXTEND_BATCHES, extend_inputs, bench=True),
    *_cases(MLA_PREFILL.name, DEVICE_PREFILL_BATCHES, expanded_inputs, bench=True),
    *WRITE_CASES,
    *ROPE_WRITE_CASES,
)
"""Every kernel of the family meets these."""

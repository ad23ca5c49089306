"""Cases of the sparse attention ops: shapes and options, inputs made from a seed. They feed tests and timings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.dsa.contract import INDEXER_SCORES, INDEXER_SCORES_RAGGED, SPARSE_DECODE, SPARSE_PREFILL
from tokenspeed_kernel.ops.dsa.topk_cases import TOPK_CASES

__all__ = ["CASES", "INDEXER_BATCHES", "SPARSE_BATCHES", "IndexerBatch", "SparseBatch", "indexer_inputs", "sparse_inputs"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
_DOUBLE: Final = Tolerance(1e-11, 1e-11)
_SCORES: Final = Tolerance(2e-5, 3e-5)
# Matrix units of Hopper add up products of fp8 in 14 bits, where they are used: 128 elements of a head, not the small cases.
_FP8_SCORES: Final = Tolerance(1e-3, 6e-3)


@dataclass(frozen=True, slots=True)
class IndexerBatch:
    """One batch of the indexer.

    Attributes:
        name: says what is special about it.
        query_lens, seq_lens: queries and keys of each request.
        num_heads, dim, page_size: shapes.
        causal: option.
        fp8: of "" (no fp8), "keys", "both": which operands are fp8_e4m3.
        missing_pages: (request, page index) entries of the page table that are invalid; for paged keys.
        strided: operands are parts of larger tensors.
        extra_columns: how far max_seqlen_k exceeds the longest request.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    dim: int = 16
    page_size: int = 4
    causal: bool = True
    fp8: str = ""
    missing_pages: tuple[tuple[int, int], ...] = ()
    strided: bool = False
    extra_columns: int = 0

    def __str__(self) -> str:
        return self.name


INDEXER_BATCHES: Final = (
    IndexerBatch("one_key", (1,), (1,)),
    IndexerBatch("no_request", (), ()),
    IndexerBatch("no_key", (1, 2, 1), (0, 3, 0)),
    IndexerBatch("decode", (1, 1, 1), (5, 40, 17)),
    IndexerBatch("four_queries", (4, 4), (33, 70)),
    IndexerBatch("mixed", (1, 1, 0, 9, 4), (5, 40, 12, 9, 23)),
    IndexerBatch("more_queries_than_keys", (6, 4, 3), (2, 0, 3)),
    IndexerBatch("not_causal", (5, 3), (9, 8), causal=False),
    IndexerBatch("page_size_1", (4, 1), (9, 6), page_size=1),
    IndexerBatch("page_size_5", (6, 2), (13, 11), page_size=5),
    IndexerBatch("page_size_64", (2,), (130,), page_size=64),
    IndexerBatch("one_head", (3,), (20,), num_heads=1),
    IndexerBatch("odd_sizes", (3,), (20,), num_heads=5, dim=21),
    IndexerBatch("heads_64_dim_128", (2,), (20,), num_heads=64, dim=128, page_size=64),
    IndexerBatch("wider_result", (3, 1), (9, 20), extra_columns=40),
    IndexerBatch("missing_page", (2, 2), (11, 9), missing_pages=((0, 0), (1, 1))),
    IndexerBatch("strided", (3, 1), (9, 20), strided=True),
    IndexerBatch("fp8_keys", (3, 1), (9, 40), fp8="keys"),
    IndexerBatch("fp8_both", (3, 1), (9, 40), fp8="both"),
    IndexerBatch("fp8_strided", (3, 1), (9, 20), fp8="both", strided=True),
)
DEVICE_INDEXER_BATCHES: Final = (
    IndexerBatch("decode_b8_kv8192_h64", (1,) * 8, (8192, 100, 1, 64, 4096, 63, 2000, 8191), 64, 128, 64),
    IndexerBatch("chunk_512_kv4096_h64", (512,), (4096,), 64, 128, 64),
    IndexerBatch("chunk_512_kv4096_h64_fp8", (512,), (4096,), 64, 128, 64, fp8="both"),
)


def indexer_inputs(
    batch: IndexerBatch, generator: torch.Generator, device: torch.device, dtype: torch.dtype, *, paged: bool
) -> dict[str, Any]:
    """Arguments of `indexer_scores`, or with ``paged=False`` of `indexer_scores_ragged`; what no request owns is NaN."""
    num_tokens, dim = sum(batch.query_lens), batch.dim
    q = torch.randn((num_tokens, batch.num_heads, dim), generator=generator)
    weights = torch.randn((num_tokens, batch.num_heads), generator=generator) / batch.num_heads
    keys = [torch.randn((length, dim), generator=generator) for length in batch.seq_lens]
    scales = [torch.rand(length, generator=generator) + 0.1 for length in batch.seq_lens]
    offsets = torch.tensor([0, *batch.query_lens]).cumsum(0).to(device, torch.int32)
    lengths: dict[str, Any]
    if paged:
        k, scale, table = _paged(batch, generator, keys, scales)
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=device)
        lengths = {"page_table": table.to(device), "seq_lens": seq_lens}
    else:
        k, scale = torch.cat([torch.zeros((0, dim)), *keys]), torch.cat([torch.zeros(0), *scales])
        lengths = {"cu_seqlens_k": torch.tensor([0, *batch.seq_lens]).cumsum(0).to(device, torch.int32)}
    q, k = (
        _dtype(q, dtype if batch.fp8 != "both" else torch.float8_e4m3fn, device),
        _dtype(k, torch.float8_e4m3fn if batch.fp8 else dtype, device),
    )
    weights, scale = weights.to(device), scale.to(device)
    if batch.strided:
        q, k = _inner(q), _inner(k)
        weights = weights.t().contiguous().t()
        scale = torch.stack((scale, scale), -1)[..., 0]
        offsets = torch.stack((offsets, offsets), -1)[:, 0]
        lengths = {name: torch.stack((one, one), -1)[..., 0] for name, one in lengths.items()}
    return {
        "q": q,
        "weights": weights,
        "k_cache" if paged else "k": k,
        **lengths,
        "cu_seqlens_q": offsets,
        "max_seqlen_q": max([*batch.query_lens, 0]),
        "max_seqlen_k": max([*batch.seq_lens, 0]) + batch.extra_columns,
        "k_scale": scale if batch.fp8 else None,
        "causal": batch.causal,
    }


def _dtype(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return values.to(device).to(dtype)


def _inner(values: torch.Tensor) -> torch.Tensor:
    """The same values as a part of a larger tensor."""
    wide = torch.empty((*values.shape[:-1], values.shape[-1] + 16), dtype=values.dtype, device=values.device)
    wide[..., :8], wide[..., 8:-8], wide[..., -8:] = math.nan, values, math.nan
    return wide[..., 8:-8]


def _paged(
    batch: IndexerBatch, generator: torch.Generator, keys: list[torch.Tensor], scales: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    page_size = batch.page_size
    pages_of = [-(-len(own) // page_size) for own in keys]
    num_pages = sum(pages_of) + 2
    columns = max([*pages_of, 1]) + -(-batch.extra_columns // page_size)
    table = torch.full((len(keys), columns), -1, dtype=torch.int32)
    cache = torch.full((num_pages, page_size, batch.dim), math.nan)
    scale = torch.full((num_pages, page_size), math.nan)
    deal, start = torch.randperm(num_pages, generator=generator), 1
    for request, (count, own, factors) in enumerate(zip(pages_of, keys, scales, strict=True)):
        mine = deal[start : start + count]
        start += count
        table[request, :count] = mine.to(torch.int32)
        positions = torch.arange(len(own))
        where = (mine[positions // page_size], positions % page_size)
        cache[where], scale[where] = own, factors
    for place, (request, index) in enumerate(batch.missing_pages):
        cache[int(table[request, index])] = math.nan
        table[request, index] = (-1, num_pages, 2**31 - 1, -(2**31))[place % 4]
    return cache, scale, table


@dataclass(frozen=True, slots=True)
class SparseBatch:
    """One batch of sparse attention.

    Attributes:
        name: says what is special about it.
        num_reqs, q_len: queries of decoding; prefill has their product.
        num_slots: entries for each query.
        num_heads, latent_dim, rope_dim, num_pages, page_size: shapes.
        ignored: part of the entries that lie outside the cache (-1, and beyond its end).
        empty_rows: queries, counted over all requests, that have no entry inside the cache.
        heavy: positions in the list of slots, one for each query, of a key that outweighs all others together.
        strided: operands are parts of larger tensors.
    """

    name: str
    num_reqs: int = 2
    q_len: int = 2
    num_slots: int = 20
    num_heads: int = 4
    latent_dim: int = 32
    rope_dim: int = 16
    num_pages: int = 30
    page_size: int = 4
    ignored: float = 0.0
    empty_rows: tuple[int, ...] = ()
    heavy: tuple[int, ...] = field(default_factory=tuple)
    strided: bool = False

    def __str__(self) -> str:
        return self.name


SPARSE_BATCHES: Final = (
    SparseBatch("plain"),
    SparseBatch("no_request", num_reqs=0),
    SparseBatch("no_slot", num_slots=0),
    SparseBatch("one_slot", num_slots=1),
    SparseBatch("no_page", num_pages=0, ignored=1.0),
    SparseBatch("some_ignored", ignored=0.3),
    SparseBatch("all_ignored", ignored=1.0),
    SparseBatch("empty_rows", empty_rows=(1, 2)),
    SparseBatch("page_size_1", page_size=1),
    SparseBatch("page_size_5", page_size=5),
    SparseBatch("one_head", num_heads=1),
    SparseBatch("heads_20_in_two_tiles", num_heads=20),
    SparseBatch("odd_dims", latent_dim=20, rope_dim=6),
    SparseBatch("latent_512_rope_64", 1, 2, 40, 16, 512, 64),
    SparseBatch("many_slots", 1, 1, 500, ignored=0.1, num_pages=200),
    SparseBatch("strided", strided=True),
    SparseBatch("heavy_keys", 10, 1, 300, 2, num_pages=400, heavy=(0, 15, 16, 31, 32, 63, 64, 127, 298, 299)),
)
DEVICE_SPARSE_BATCHES: Final = (
    SparseBatch("b4_q2_h128_topk2048", 4, 2, 2048, 128, 512, 64, 256, 64, ignored=0.05),
    SparseBatch("b32_q1_h64_topk2048", 32, 1, 2048, 64, 512, 64, 256, 64, empty_rows=(3,)),
    SparseBatch("b1_q256_h128_topk2048", 1, 256, 2048, 128, 512, 64, 256, 64),
)
_HEAVY: Final = 24.0


def sparse_inputs(
    batch: SparseBatch, generator: torch.Generator, device: torch.device, dtype: torch.dtype, *, decode: bool
) -> dict[str, Any]:
    """Arguments of `sparse_decode` or `sparse_prefill`, without out and return_lse. Slots that nobody names hold NaN."""
    width, num_tokens = batch.latent_dim + batch.rope_dim, batch.num_reqs * batch.q_len
    capacity = batch.num_pages * batch.page_size
    q = torch.randn((num_tokens, batch.num_heads, width), generator=generator)
    cache = torch.randn((capacity, width), generator=generator)
    slots = torch.randint(max(capacity, 1), (num_tokens, batch.num_slots), generator=generator, dtype=torch.int32)
    if batch.heavy:
        # Slots of their own, which nothing else names.
        slots = torch.randint(capacity - num_tokens, slots.shape, generator=generator, dtype=torch.int32)
        q[..., 0] = 4.0
        cache[capacity - num_tokens :, 0] = _HEAVY
        for row, place in enumerate(batch.heavy):
            slots[row, place] = capacity - num_tokens + row
    outside = torch.rand(slots.shape, generator=generator) < batch.ignored
    outside[list(batch.empty_rows)] = True
    others = torch.tensor([-1, capacity, 2**31 - 1, -(2**31)], dtype=torch.int32)
    slots[outside] = others[torch.randint(4, (int(outside.sum()),), generator=generator)]
    named = torch.zeros(capacity, dtype=torch.bool)
    named[slots[~outside].long()] = True
    cache[~named] = math.nan
    q, cache, slots = q.to(device, dtype), cache.view(batch.num_pages, batch.page_size, width).to(device, dtype), slots.to(device)
    if decode:
        q, slots = (one.view(batch.num_reqs, batch.q_len, *one.shape[1:]) for one in (q, slots))
    if batch.strided:
        q, cache, slots = _inner(q), _inner(cache), _inner_slots(slots)
    return {"q": q, "kv_cache": cache, "slots": slots, "softmax_scale": width**-0.5, "latent_dim": batch.latent_dim}


def _inner_slots(slots: torch.Tensor) -> torch.Tensor:
    return torch.cat((slots, torch.full_like(slots, 3)), -1)[..., : slots.shape[-1]]


def _indexer_cases(batches: tuple[IndexerBatch, ...], *, paged: bool, bench: bool = False) -> list[Case]:
    def case(batch: IndexerBatch) -> Case:
        def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
            return indexer_inputs(batch, generator, device, dtype, paged=paged)

        op = (INDEXER_SCORES if paged else INDEXER_SCORES_RAGGED).name
        # Scores are float32 whatever the operands. Weights of both signs let the sum over 64 heads be small beside its terms.
        scores = _FP8_SCORES if batch.fp8 == "both" and batch.dim >= 128 else _SCORES
        return Case(op, batch.name, build, tolerance={torch.float32: scores}, bench=bench)

    return [case(batch) for batch in batches if paged or not (batch.missing_pages or batch.name.startswith("page_size"))]


def _sparse_cases(batches: tuple[SparseBatch, ...], *, decode: bool, bench: bool = False) -> list[Case]:
    def case(batch: SparseBatch, return_lse: bool) -> Case:
        def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
            made = sparse_inputs(batch, generator, device, dtype, decode=decode)
            return {**made, "return_lse": True} if return_lse else made

        # The LSE has no output argument: those cases are run without given outputs.
        return Case(
            (SPARSE_DECODE if decode else SPARSE_PREFILL).name,
            f"{batch.name} lse" if return_lse else batch.name,
            build,
            outputs=() if return_lse else ("out",),
            tolerance={torch.float64: _DOUBLE},
            bench=bench,
        )

    plain = [case(batch, False) for batch in batches]
    return plain if bench else plain + [case(batch, True) for batch in batches]


CASES: Final = (
    *_indexer_cases(INDEXER_BATCHES, paged=True),
    *_indexer_cases(INDEXER_BATCHES, paged=False),
    *TOPK_CASES,
    *_sparse_cases(SPARSE_BATCHES, decode=True),
    *_sparse_cases(SPARSE_BATCHES, decode=False),
    *_indexer_cases(DEVICE_INDEXER_BATCHES, paged=True, bench=True),
    *_indexer_cases(DEVICE_INDEXER_BATCHES[1:], paged=False, bench=True),
    *_sparse_cases(DEVICE_SPARSE_BATCHES[:2], decode=True, bench=True),
    *_sparse_cases(DEVICE_SPARSE_BATCHES[2:], decode=False, bench=True),
)
"""Every kernel of the family meets these."""

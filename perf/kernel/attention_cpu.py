"""Attention over a paged cache on the CPU, beside PyTorch's attention over keys that lie in one piece.

The peer gets what a paged engine does not have: each request's keys contiguous in memory, and for a batch of unequal lengths all
of them padded into one tensor beforehand, outside the timing. Ours gathers the pages inside the timing, with one plan for all
layers, as an engine calls it. Layers take turns over more memory than the caches hold, so keys come from memory as in a model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from perf.harness import Benchmark, Context, Row, time_pair_s
from tokenspeed_kernel.ops import attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
_COLD_BYTES = 96 << 20
"""Several times the shared cache of the machine that the goals were set on."""

Call = Callable[[], object]


def _lengths(num_requests: int, low: int, high: int) -> list[int]:
    chosen = random.Random(num_requests)
    return [chosen.randint(low, high) for _ in range(num_requests)]


DECODE = (
    ("1 row, 300 keys", [300]),
    ("1 row, 3000 keys", [3000]),
    ("16 rows, 300 keys", [300] * 16),
    ("16 rows, 250..350 keys", _lengths(16, 250, 350)),
    ("16 rows, 40..3000 keys", _lengths(16, 40, 3000)),
    ("64 rows, 40..600 keys", _lengths(64, 40, 600)),
)
EXTEND = ((64, 0), (256, 0), (512, 0), (64, 1000), (256, 1000), (64, 3000), (512, 3000))


class _Batch:
    """Random pages of several layers, and the same keys and values in one piece."""

    def __init__(self, query_lens: list[int], seq_lens: list[int], num_layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pages_of = [-(-length // PAGE_SIZE) for length in seq_lens]
        num_pages, longest = sum(pages_of), max(seq_lens)
        order = torch.randperm(num_pages, generator=generator).to(torch.int32)
        self.page_table = torch.full((len(seq_lens), max(pages_of)), -1, dtype=torch.int32)
        for row, own in enumerate(order.split(pages_of)):
            self.page_table[row, : len(own)] = own
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
        self.max_seqlen_q, self.max_seqlen_k = max(query_lens), longest
        self.q = torch.randn((sum(query_lens), NUM_HEADS, HEAD_DIM), generator=generator)
        shape = (num_layers, 2, num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.caches = torch.randn(shape, generator=generator)
        # [layer, K or V, request, key head, key, element]
        self.contiguous = torch.zeros((num_layers, 2, len(seq_lens), NUM_KV_HEADS, longest, HEAD_DIM))
        for row, (own, length) in enumerate(zip(order.split(pages_of), seq_lens, strict=True)):
            tokens = self.caches[:, :, own.long()].flatten(2, 3)[:, :, :length]
            self.contiguous[:, :, row, :, :length] = tokens.transpose(2, 3)
        self.plan = attention.plan(
            self.page_table,
            self.seq_lens,
            self.cu_seqlens_q,
            page_size=PAGE_SIZE,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=longest,
        )


def _num_layers(seq_lens: list[int]) -> int:
    layer_bytes = sum(seq_lens) * NUM_KV_HEADS * HEAD_DIM * 2 * 4
    return max(2, min(30, -(-_COLD_BYTES // layer_bytes)))


def _decode(seq_lens: list[int]) -> tuple[Call, Call]:
    batch = _Batch([1] * len(seq_lens), seq_lens, _num_layers(seq_lens))
    layers = itertools.cycle(range(len(batch.caches)))
    group = NUM_HEADS // NUM_KV_HEADS
    padding = torch.arange(batch.max_seqlen_k) >= batch.seq_lens[:, None]
    mask = torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)[:, None, None, :] if bool(padding.any()) else None

    def ours() -> object:
        k_cache, v_cache = batch.caches[next(layers)]
        return attention.mha_decode(
            batch.q,
            k_cache,
            v_cache,
            batch.page_table,
            batch.seq_lens,
            max_seqlen_k=batch.max_seqlen_k,
            plan=batch.plan,
        )

    def peer() -> object:
        # Query heads of a group as rows: the fastest form that was found for it.
        k, v = batch.contiguous[next(layers)]
        q = batch.q.view(-1, NUM_KV_HEADS, group, HEAD_DIM)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return ours, peer


def _extend(num_queries: int, num_cached: int) -> tuple[Call, Call]:
    batch = _Batch([num_queries], [num_cached + num_queries], 2)
    layers = itertools.cycle(range(2))
    group = NUM_HEADS // NUM_KV_HEADS
    positions = torch.arange(num_cached, num_cached + num_queries)[:, None]
    hidden = torch.arange(num_cached + num_queries) > positions
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def ours() -> object:
        k_cache, v_cache = batch.caches[next(layers)]
        return attention.mha_extend(
            batch.q,
            k_cache,
            v_cache,
            batch.page_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            plan=batch.plan,
        )

    def peer() -> object:
        k, v = batch.contiguous[next(layers)][:, 0, :, None].expand(-1, -1, group, -1, -1)
        q = batch.q.view(num_queries, NUM_KV_HEADS, group, HEAD_DIM).permute(1, 2, 0, 3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return ours, peer


def run(context: Context) -> Iterator[Row]:
    """Time decoding and extension, fp32, all threads of PyTorch."""
    repeats = 5 if context.quick else 30
    name = f"torch {torch.__version__} scaled_dot_product_attention, contiguous keys"
    shape = f"fp32, heads {NUM_HEADS}/{NUM_KV_HEADS}, d{HEAD_DIM}, page {PAGE_SIZE}, {torch.get_num_threads()} threads"
    with torch.inference_mode():
        for label, seq_lens in DECODE[:2] if context.quick else DECODE:
            ours, peer = _decode(seq_lens)
            mine, theirs = time_pair_s(ours, peer, repeats=repeats)
            yield Row(f"mha_decode {label}; {shape}", mine * 1e6, theirs * 1e6, "us", name, higher_is_better=False)
        for num_queries, num_cached in EXTEND[:2] if context.quick else EXTEND:
            ours, peer = _extend(num_queries, num_cached)
            mine, theirs = time_pair_s(ours, peer, repeats=repeats)
            label = f"{num_queries} queries over {num_cached} cached"
            yield Row(f"mha_extend {label}; {shape}", mine * 1e6, theirs * 1e6, "us", name, higher_is_better=False)


BENCHMARK = Benchmark(
    name="kernel.attention_cpu",
    summary="paged decode and extension against PyTorch's attention on contiguous keys, on the CPU",
    run=run,
)

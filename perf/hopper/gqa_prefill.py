"""Prefill of grouped queries on a Hopper GPU: bf16, causal, ragged and on paged caches, whole prompts and chunks over cached keys.

The kernel that selection takes, beside the portable Triton kernel, cuDNN through PyTorch over contiguous keys (whole prompts), and
FlashInfer (fa3) on the same tensors and pages. Every measurement starts after a pause of half a second: see `Bench.measured`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Peer, Result, Work
from tokenspeed_kernel.ops import attention

_CUDNN, _RAGGED, _PAGED = "cuDNN, contiguous keys", "FlashInfer fa3, ragged", "FlashInfer fa3, paged"
_PAUSE_S = 0.5
_SETS = 2  # of keys and values, each larger than the L2 cache
_Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Equal requests; ragged where page_size is 0."""

    num_requests: int
    num_queries: int
    num_keys: int
    page_size: int = 0
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        pages = f"page {self.page_size}" if self.page_size else "ragged"
        cached = self.num_keys - self.num_queries
        over = f" over {cached}" if cached else ""
        return f"{self.num_requests}x{self.num_queries}{over} {self.num_heads}/{self.num_kv_heads} d{self.head_dim} {pages}"

    @property
    def flops(self) -> float:
        """Floating-point operations of the products that causality leaves."""
        seen = self.num_queries * (self.num_keys - (self.num_queries - 1) / 2)
        return 4.0 * self.num_requests * self.num_heads * self.head_dim * seen


SHAPES = (
    *(Shape(8, 4096, 4096, page) for page in (0, 64, 16)),
    *(Shape(4, 1024, 32768 + 1024, page) for page in (64, 16)),
    *(Shape(8, 4096, 4096, page, 64, 8, 64) for page in (0, 64)),
    Shape(1, 512, 8192, 64),
    Shape(16, 512, 512, 64),
)


class Batch:
    """Tensors of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        count, queries, keys, page = shape.num_requests, shape.num_queries, shape.num_keys, shape.page_size
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q = torch.randn((count * queries, shape.num_heads, shape.head_dim), **options)
        self.out = torch.empty_like(self.q)
        rows = (count * keys // page, page) if page else (count * keys,)
        size = (2, *rows, shape.num_kv_heads, shape.head_dim)
        self.keys = [tuple(torch.randn(size, **options)) for _ in range(_SETS)]
        self.starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * queries
        self.key_starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * keys
        self.lens = torch.full((count,), keys, dtype=torch.int32, device="cuda")
        if page:
            self.table = torch.randperm(count * keys // page, device="cuda").to(torch.int32).view(count, -1)
            self.plan = attention.plan(self.table, self.lens, self.starts, page_size=page, max_seqlen_q=queries, max_seqlen_k=keys)

    def call(self, k: torch.Tensor, v: torch.Tensor, solution: str | None, lse: bool = False) -> object:
        """The op."""
        sizes: dict[str, Any] = {"max_seqlen_q": self.shape.num_queries, "max_seqlen_k": self.shape.num_keys}
        options: dict[str, Any] = {"out": self.out, "return_lse": lse, "solution": solution}
        if self.shape.page_size:
            return attention.mha_extend(self.q, k, v, self.table, self.starts, self.lens, **sizes, **options, plan=self.plan)
        return attention.mha_prefill(self.q, k, v, self.starts, self.key_starts, **sizes, **options)

    def calls(self, solution: str | None = None) -> _Calls:
        """Of the op, one for each set of keys."""
        return [lambda k=k, v=v: self.call(k, v, solution) for k, v in self.keys]

    def solution(self) -> str:
        """The kernel that selection takes."""
        k, v = self.keys[0]
        sizes: dict[str, Any] = {"max_seqlen_q": self.shape.num_queries, "max_seqlen_k": self.shape.num_keys}
        if self.shape.page_size:
            pages: dict[str, Any] = {"page_table": self.table, "cu_seqlens_q": self.starts, "seq_lens": self.lens}
            return chosen(attention.mha_extend, q=self.q, k_cache=k, v_cache=v, **pages, **sizes)
        return chosen(attention.mha_prefill, q=self.q, k=k, v=v, cu_seqlens_q=self.starts, cu_seqlens_k=self.key_starts, **sizes)

    def error(self) -> Error:
        """How far the first and the last request are from attention in float32."""
        shape = self.shape
        k_rows, v_rows = self.keys[0]
        got = self.call(k_rows, v_rows, None, lse=True)
        assert isinstance(got, tuple)
        found: Error | None = None
        for request in {0, shape.num_requests - 1}:
            places = torch.arange(shape.num_keys, device="cuda")
            if shape.page_size:
                where = (self.table[request].long()[places // shape.page_size], places % shape.page_size)
            else:
                where = (places + request * shape.num_keys,)
            hidden = places > places[shape.num_keys - shape.num_queries :, None]
            rows = slice(request * shape.num_queries, (request + 1) * shape.num_queries)
            for head in range(shape.num_heads):
                kv_head = head * shape.num_kv_heads // shape.num_heads
                k, v = (x[where][:, kv_head].float() for x in (k_rows, v_rows))
                logits = (self.q[rows, head].float() @ k.T * shape.head_dim**-0.5).masked_fill_(hidden, -torch.inf)
                want = torch.softmax(logits, -1) @ v
                error = Error.of(got[0][rows, head], want, got[1][rows, head], torch.logsumexp(logits, -1))
                found = error if found is None else found.worst(error)
        assert found is not None
        return found

    def cudnn(self) -> _Calls:
        """cuDNN over the same memory taken as contiguous keys: [requests, keys, heads, head_dim]."""
        shape = self.shape
        q = self.q.view(shape.num_requests, shape.num_queries, shape.num_heads, -1).transpose(1, 2)
        sets = [
            [x.view(shape.num_requests, shape.num_keys, shape.num_kv_heads, -1).transpose(1, 2) for x in pair] for pair in self.keys
        ]

        def call(k: torch.Tensor, v: torch.Tensor) -> object:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return [lambda k=k, v=v: call(k, v) for k, v in sets]

    def flashinfer(self) -> _Calls:
        """FlashInfer's fa3 with its plan made beforehand.

        Raises:
            ImportError: it is not installed.  RuntimeError, OSError: it cannot compile what it needs.
        """
        import flashinfer

        shape = self.shape
        space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        types = {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        if not shape.page_size:
            ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa3")
            ragged.plan(self.starts, self.key_starts, *heads, **types)
            return [lambda k=k, v=v: ragged.run(self.q, k, v, out=self.out) for k, v in self.keys]
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
        pages = torch.arange(shape.num_requests + 1, dtype=torch.int32, device="cuda") * self.table.shape[1]
        last = torch.full_like(self.lens, shape.page_size)
        paged.plan(self.starts, pages, self.table.flatten(), last, *heads, shape.page_size, **types)
        return [lambda k=k, v=v: paged.run(self.q, (k, v), out=self.out) for k, v in self.keys]


def work(shape: Shape) -> Work:
    """Queries, keys and values read once, results written; what was promised."""
    tokens = shape.num_requests * (shape.num_queries * shape.num_heads + shape.num_keys * shape.num_kv_heads)
    goal = Goal(1.25, (_PAGED,)) if shape.page_size else Goal(1.0, (_RAGGED,))
    return Work(str(shape), 2 * 2 * tokens * shape.head_dim, shape.flops, (goal,))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of all peers."""
    batch = Batch(shape)
    error = batch.error()
    portable = "triton_mha_extend" if shape.page_size else "triton_mha_prefill"
    peers: dict[str, Peer] = {"portable Triton": lambda: batch.calls(portable)}
    if shape.num_queries == shape.num_keys:
        peers[_CUDNN] = batch.cudnn
    peers[_PAGED if shape.page_size else _RAGGED] = batch.flashinfer
    return bench.measured(
        work(shape), batch.calls(), peers, error=error, problem=error.problem(), solution=batch.solution(), pause_s=_PAUSE_S
    )


FAMILY = Family(
    "gqa_prefill", "causal prefill of grouped queries, ragged and paged, against cuDNN and FlashInfer", SHAPES, work, measure
)
BENCHMARK = as_benchmark(FAMILY)

"""Paged decode, paged and ragged prefill on a CUDA device, beside PyTorch's attention over contiguous keys.

Times are of CUDA graph replays that walk through several layers' caches (random data, more than the L2 cache holds), per layer.
The limit is the time to read the keys and values once at the device's measured copy rate, or the products at its measured matrix
rate, whichever is longer; both are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perf.graph_replay import device_rates, replay_us
from perf.harness import Benchmark, Context, Row
from tokenspeed_kernel.ops import attention

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests."""

    num_requests: int
    num_queries: int
    num_keys: int
    page_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        page = f"page {self.page_size}" if self.page_size else "ragged"
        heads = f"{self.num_heads}/{self.num_kv_heads} d{self.head_dim}"
        return f"b{self.num_requests} q{self.num_queries} kv{self.num_keys} {heads} {page} {dtype}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self.num_requests * self.num_keys * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Floating-point operations of the products that causality leaves."""
        seen = self.num_queries * (self.num_keys - (self.num_queries - 1) / 2)
        return 4.0 * self.num_requests * self.num_heads * self.head_dim * seen


SHAPES = (
    *(Shape(batch, 1, keys, page) for page in (16, 64) for batch, keys in ((1, 1024), (1, 8192), (1, 65536), (64, 8192))),
    Shape(16, 1, 300, 16, 9, 3, 64),
    Shape(64, 1, 2048, 64, 32, 32, 128),
    *(Shape(8, 4096, 4096, page) for page in (0, 16, 64)),
    *(Shape(1, 512, 8192, page) for page in (16, 64)),
    Shape(4, 1024, 1024, 0, 32, 8, 64),
    Shape(1, 512, 2048, 16, 9, 3, 64, torch.float32),
    Shape(16, 1, 2048, 16, 9, 3, 64, torch.float32),
)


def _calls(shape: Shape) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Ours and the peer's, one for each layer."""
    requests, queries, keys, page = shape.num_requests, shape.num_queries, shape.num_keys, shape.page_size
    layers = max(2, min(32, -(-_COLD_BYTES // shape.kv_bytes)))
    options = {"dtype": shape.dtype, "device": "cuda"}
    q = torch.randn((requests * queries, shape.num_heads, shape.head_dim), **options)
    heads = (shape.num_kv_heads, shape.head_dim)
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * queries
    lens = torch.full((requests,), keys, dtype=torch.int32, device="cuda")
    ours: list[Callable[[], object]] = []
    if page == 0:
        key_starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * keys
        for _ in range(layers):
            k, v = torch.randn((2, requests * keys, *heads), **options)
            ours.append(
                lambda k=k, v=v: attention.mha_prefill(
                    q, k, v, starts, key_starts, max_seqlen_q=queries, max_seqlen_k=keys, solution="triton"
                )
            )
    else:
        columns = -(-keys // page)
        table = torch.randperm(requests * columns, device="cuda").to(torch.int32).view(requests, columns)
        made = attention.plan(table, lens, starts, page_size=page, max_seqlen_q=queries, max_seqlen_k=keys)
        for _ in range(layers):
            k, v = torch.randn((2, requests * columns, page, *heads), **options)
            if queries == 1:
                ours.append(
                    lambda k=k, v=v: attention.mha_decode(q, k, v, table, lens, max_seqlen_k=keys, plan=made, solution="triton")
                )
            else:
                ours.append(
                    lambda k=k, v=v: attention.mha_extend(
                        q, k, v, table, starts, lens, max_seqlen_q=queries, max_seqlen_k=keys, plan=made, solution="triton"
                    )
                )
    peer: list[Callable[[], object]] = []
    q_heads = q.view(requests, queries, shape.num_heads, shape.head_dim).transpose(1, 2)
    square = queries == keys
    mask = None
    if queries > 1 and not square:
        positions = torch.arange(keys - queries, keys, device="cuda")[:, None]
        mask = torch.arange(keys, device="cuda") <= positions
    for _ in range(layers):
        k, v = torch.randn((2, requests, shape.num_kv_heads, keys, shape.head_dim), **options)
        peer.append(
            lambda k=k, v=v: F.scaled_dot_product_attention(
                q_heads, k, v, attn_mask=mask, is_causal=square and queries > 1, enable_gqa=True
            )
        )
    return ours, peer


def run(context: Context) -> Iterator[Row]:
    """Yield one row for each shape; without a CUDA device one row that says so."""
    if not torch.cuda.is_available():
        yield Row("attention on CUDA", None, None, "us", note="needs a CUDA device; torch sees none")
        return
    read_rate, product_rate = device_rates()
    peer_name = f"torch {torch.__version__} scaled_dot_product_attention, contiguous keys"
    for shape in SHAPES[:3] if context.quick else SHAPES:
        ours, peer = _calls(shape)
        figures: list[float | None] = []
        notes = []
        for name, calls in (("ours", ours), ("peer", peer)):
            try:
                figures.append(replay_us(calls, 5 if context.quick else 20))
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                figures.append(None)
                notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        limit = max(shape.kv_bytes / read_rate, shape.flops / product_rate) * 1e6
        if shape.dtype == torch.float32:
            limit = shape.kv_bytes / read_rate * 1e6
        yield Row(str(shape), figures[0], figures[1], "us", peer_name, limit, False, note="; ".join(notes))
        del ours, peer
        torch.cuda.empty_cache()


BENCHMARK = Benchmark(
    name="kernel.attention_gpu",
    summary="paged decode and prefill against PyTorch's attention on contiguous keys, by CUDA graph replay",
    run=run,
)

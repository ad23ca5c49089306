"""Paged decoding of grouped queries on a Hopper GPU: bf16, 32/8 heads of 128 and 64/8 heads of 64 with sinks and a window.

The kernel that selection takes, beside the portable Triton kernel on the same pages, PyTorch's attention over contiguous keys, and
FlashInfer on the same pages: its decode as it comes, which the goals are over, and with `use_tensor_cores=True`. Times are of CUDA
graph replays that walk through several layers' caches (random data, several times the L2 cache), per layer. FlashInfer's decode
takes no sinks: with a window it has none, and less to do than ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import LIMIT, Error, Family, Goal, Peer, Result, Work
from tokenspeed_kernel.ops import attention

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_FLASHINFER = {"FlashInfer": False, "FlashInfer, tensor cores": True}
"""Whether it uses tensor cores, by what it is called here."""
_Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: equal requests of `num_keys`, or the lengths of each."""

    num_requests: int
    num_keys: int
    page_size: int = 64
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    spread: bool = False

    def __str__(self) -> str:
        keys = f"kv1024..{self.num_keys}" if self.spread else f"kv{self.num_keys}"
        options = f" window {self.window} sinks" if self.window else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} d{self.head_dim}"
        return f"b{self.num_requests} {keys} {heads} page {self.page_size}{options}"

    @property
    def lengths(self) -> list[int]:
        """Keys of each request; spread lengths are evenly apart in their logarithm, and shuffled."""
        if not self.spread:
            return [self.num_keys] * self.num_requests
        most = self.num_keys / 1024
        return [int(1024 * most ** (one * 37 % self.num_requests / (self.num_requests - 1))) for one in range(self.num_requests)]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values that are seen."""
        seen = sum(min(length, self.window or length) for length in self.lengths)
        return 4 * seen * self.num_kv_heads * self.head_dim


_D64 = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64}
SHAPES = (
    *(Shape(batch, keys) for batch in (1, 4, 16, 64, 128) for keys in (1024, 8192)),
    *(Shape(batch, 65536) for batch in (1, 4)),
    Shape(64, 65536, spread=True),
    *(Shape(batch, keys, 16) for batch, keys in ((1, 1024), (1, 8192), (1, 65536), (16, 1024), (64, 8192))),
    *(Shape(batch, keys, **_D64) for batch, keys in ((1, 1024), (1, 8192), (1, 65536), (16, 8192), (64, 8192))),
    *(Shape(batch, keys, **_D64, window=128) for batch, keys in ((1, 8192), (1, 65536), (64, 8192), (128, 8192))),
    Shape(64, 8192, 16, **_D64),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of a shape: one cache for each layer."""

    shape: Shape
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lens: torch.Tensor
    sinks: torch.Tensor | None

    @staticmethod
    def of(shape: Shape) -> Batch:
        """Random ones, pages dealt at random."""
        layers = max(2, min(64, -(-_COLD_BYTES // max(1, shape.kv_bytes))))
        pages = [-(-length // shape.page_size) for length in shape.lengths]
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        if shape.window:  # the rest of the cache is not read: fewer layers do, and they must fit
            layers = max(2, min(layers, (8 << 30) // (sum(pages) * shape.page_size * 4 * shape.num_kv_heads * shape.head_dim)))
        cache = (2, sum(pages), shape.page_size, shape.num_kv_heads, shape.head_dim)
        dealt = torch.randperm(sum(pages), device="cuda").to(torch.int32)
        table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32, device="cuda")
        for row, own in zip(table, dealt.split(pages), strict=True):
            row[: len(own)] = own
        caches = []
        for _ in range(layers):
            k, v = torch.randn(cache, **options)
            caches.append((k, v))
        return Batch(
            shape,
            torch.randn((shape.num_requests, shape.num_heads, shape.head_dim), **options),
            caches,
            table,
            torch.tensor(shape.lengths, dtype=torch.int32, device="cuda"),
            torch.randn(shape.num_heads, device="cuda") if shape.window else None,
        )

    def calls(self, solution: str | None = None) -> list[_Call]:
        """Of the op, one for each layer, with one plan for all."""
        most = max(self.shape.lengths)
        made = attention.plan(self.table, self.lens, page_size=self.shape.page_size, max_seqlen_k=most)
        return [
            lambda k=k, v=v: attention.mha_decode(
                self.q,
                k,
                v,
                self.table,
                self.lens,
                max_seqlen_k=most,
                sliding_window=self.shape.window,
                sinks=self.sinks,
                plan=made,
                solution=solution,
            )
            for k, v in self.caches
        ]

    def contiguous(self) -> list[_Call]:
        """PyTorch's attention over the same memory taken as contiguous keys: [requests, heads, keys, head_dim]."""
        shape = self.shape
        size = (shape.num_requests, shape.num_kv_heads, shape.num_keys, shape.head_dim)
        # Lengths of equal requests are multiples of the page size, so that the cache is as large.
        pairs = [(k.view(size), v.view(size)) for k, v in self.caches]
        q = self.q[:, :, None, :]
        return [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in pairs]

    def error(self) -> Error:
        """How far the result of some of the requests is from attention in float32."""
        shape, (k_cache, v_cache) = self.shape, self.caches[0]
        got = self.calls()[0]()
        assert isinstance(got, torch.Tensor)
        group = shape.num_heads // shape.num_kv_heads
        found: Error | None = None
        for request, length in list(enumerate(shape.lengths))[:: max(1, shape.num_requests // 4)]:
            keys = torch.arange(max(0, length - (shape.window or length)), length, device="cuda")
            where = (self.table[request].long()[keys // shape.page_size], keys % shape.page_size)
            k, v = k_cache[where].float(), v_cache[where].float()
            logits = torch.einsum("hgd,nhd->hgn", self.q[request].float().unflatten(0, (-1, group)), k) * shape.head_dim**-0.5
            if self.sinks is not None:
                logits = torch.cat((logits, self.sinks.view(-1, group, 1)), -1)
            weights = torch.softmax(logits, -1)[..., : len(keys)]
            error = Error.of(got[request], torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
            found = error if found is None else found.worst(error)
        assert found is not None
        return found

    def flashinfer(self, tensor_cores: bool) -> list[_Call]:
        """FlashInfer's paged decode with its plan made beforehand.

        Raises:
            ImportError: it is not installed.  RuntimeError, OSError: it cannot compile what it needs.
        """
        import flashinfer

        shape = self.shape
        pages = [-(-length // shape.page_size) for length in shape.lengths]
        starts = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
        indices = torch.cat([row[:count] for row, count in zip(self.table, pages, strict=True)])
        last = torch.tensor([(length - 1) % shape.page_size + 1 for length in shape.lengths], dtype=torch.int32)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=torch.empty_like(starts, device="cuda"),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last, device="cuda"),
        )
        wrapper.plan(
            starts,
            indices,
            last,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            window_left=-1 if shape.window is None else shape.window - 1,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return [lambda k=k, v=v: wrapper.run(self.q, (k, v)) for k, v in self.caches]


def work(shape: Shape) -> Work:
    """Keys and values read once, queries read and results written; what was promised."""
    rows = 2 * 2 * shape.num_requests * shape.num_heads * shape.head_dim
    seen = shape.kv_bytes // (4 * shape.num_kv_heads * shape.head_dim)
    goals = [Goal(1.5 if shape.num_requests == 1 and shape.num_keys == 65536 and not shape.window else 1.3, ("FlashInfer",))]
    if shape.num_requests >= 64 and shape.num_keys == 8192 and not shape.window:
        goals.append(Goal(0.9, (LIMIT,)))
    return Work(str(shape), shape.kv_bytes + rows, 4.0 * seen * shape.num_heads * shape.head_dim, tuple(goals))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of all peers."""
    batch = Batch.of(shape)
    (k, v), most = batch.caches[0], max(shape.lengths)
    operands = {"q": batch.q, "k_cache": k, "v_cache": v, "page_table": batch.table, "seq_lens": batch.lens, "max_seqlen_k": most}
    solution = chosen(attention.mha_decode, **operands, sliding_window=shape.window, sinks=batch.sinks)
    error = batch.error()
    peers: dict[str, Peer] = {"portable Triton": lambda: batch.calls("triton_mha_decode")}
    if not shape.window and not shape.spread:
        peers["torch SDPA, contiguous keys"] = batch.contiguous
    for name, tensor_cores in _FLASHINFER.items():
        peers[name] = lambda tensor_cores=tensor_cores: batch.flashinfer(tensor_cores)
    return bench.measured(work(shape), batch.calls(), peers, error=error, problem=error.problem(), solution=solution)


FAMILY = Family(
    "gqa_decode",
    "paged decoding of grouped queries against the read limit, SDPA, the portable kernel and FlashInfer",
    SHAPES,
    work,
    measure,
)
BENCHMARK = as_benchmark(FAMILY)

"""Paged decoding of grouped queries on a Hopper GPU: bf16, 32/8 heads of 128 and 64/8 heads of 64 with sinks and a window.

Each shape has a row for each peer: the time to read its keys and values at the rate that is measured in the same run, the portable
Triton kernel on the same pages, PyTorch's attention over contiguous keys, and FlashInfer on the same pages where it is installed.
Times are of CUDA graph replays that walk through several layers' caches (random data, several times the L2 cache), per layer.
Before a shape is timed its result is held against attention in float32: what is not right has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from perf.graph_replay import replay_us, timed_us
from perf.harness import Benchmark, Context, Row
from tokenspeed_kernel.ops import attention

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_COSINE = 0.99999
_OURS = "hopper"
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

    def calls(self, solution: str) -> list[_Call]:
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

    def error(self) -> str:
        """What is wrong with our kernel's result; empty where it is right."""
        shape, (k_cache, v_cache) = self.shape, self.caches[0]
        got = self.calls(_OURS)[0]()
        assert isinstance(got, torch.Tensor)
        group = shape.num_heads // shape.num_kv_heads
        for request, length in list(enumerate(shape.lengths))[:: max(1, shape.num_requests // 4)]:
            keys = torch.arange(max(0, length - (shape.window or length)), length, device="cuda")
            where = (self.table[request].long()[keys // shape.page_size], keys % shape.page_size)
            k, v = k_cache[where].float(), v_cache[where].float()
            logits = torch.einsum("hgd,nhd->hgn", self.q[request].float().unflatten(0, (-1, group)), k) * shape.head_dim**-0.5
            if self.sinks is not None:
                logits = torch.cat((logits, self.sinks.view(-1, group, 1)), -1)
            weights = torch.softmax(logits, -1)[..., : len(keys)]
            want = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
            cosine = float(F.cosine_similarity(got[request].double().flatten(), want.double().flatten(), dim=0))
            if not cosine > _COSINE:
                return f"wrong: cosine {cosine:.7f} at request {request}"
        return ""


def flashinfer_calls(batch: Batch) -> list[_Call] | str:
    """FlashInfer's paged decode with its plan made beforehand, or why there is none."""
    if batch.sinks is not None:
        return "its decode takes no sinks"
    try:
        import flashinfer
    except ImportError as error:
        return f"not installed: {error}"
    try:
        wrapper = _flashinfer_wrapper(flashinfer, batch)
    except (RuntimeError, OSError) as error:  # it compiles at the first call
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [lambda k=k, v=v: wrapper.run(batch.q, (k, v)) for k, v in batch.caches]


def _flashinfer_wrapper(flashinfer: Any, batch: Batch) -> Any:
    shape = batch.shape
    pages = [-(-length // shape.page_size) for length in shape.lengths]
    starts = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
    indices = torch.cat([row[:count] for row, count in zip(batch.table, pages, strict=True)])
    last = torch.tensor([(length - 1) % shape.page_size + 1 for length in shape.lengths], dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
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
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return wrapper


def read_rate() -> float:
    """Bytes a second that the device reads: the best of several forms of a kernel that adds up 2 GiB."""
    import triton

    from perf.hopper.read_kernel import sum_kernel

    data = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    sums = torch.empty(4096, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    best = 0.0
    for block, programs, warps in ((4096, 4, 8), (8192, 4, 8), (4096, 8, 4), (16384, 2, 16)):
        grid, blocks = (programs * processors,), triton.cdiv(data.numel(), block)
        call = lambda grid=grid, blocks=blocks, block=block, warps=warps: sum_kernel[grid](  # noqa: E731
            data, sums, blocks, BLOCK=block, num_warps=warps
        )
        best = max(best, data.nbytes / replay_us([call], 10) * 1e6)
    return best


def run(context: Context) -> Iterator[Row]:
    """Yield the rows of each shape; without a Hopper GPU one row that says so."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        yield Row("GQA decode on Hopper", None, None, "us", note="needs a GPU of compute capability 9.0; torch sees none")
        return
    rate = read_rate()
    yield Row("read of 2 GiB", rate / 1e12, None, "TB/s")
    repeats = 3 if context.quick else 12
    for shape in SHAPES[:3] if context.quick else SHAPES:
        limit = shape.kv_bytes / rate * 1e6
        batch = Batch.of(shape)
        problem = batch.error()
        if problem:
            yield Row(str(shape), None, limit, "us", "read limit", limit, False, note=problem)
            continue
        ours = replay_us(batch.calls(_OURS), repeats)
        large = shape.num_requests >= 64 and shape.num_keys == 8192 and not shape.window
        yield Row(str(shape), ours, limit, "us", "read limit of this run", limit, False, 0.9 if large else None)
        found: dict[str, list[_Call] | str] = {"triton_mha_decode": batch.calls("triton_mha_decode")}
        if not shape.window and not shape.spread:
            found[f"torch {torch.__version__} SDPA, contiguous keys"] = batch.contiguous()
        found["FlashInfer, paged"] = flashinfer_calls(batch)
        for name, calls in found.items():
            goal = None
            if name.startswith("FlashInfer"):
                goal = 1.5 if shape.num_requests == 1 and shape.num_keys == 65536 else 1.3
            peer, note = timed_us(calls, repeats)
            yield Row(str(shape), ours, peer, "us", name, limit, False, goal, note)
        del batch, found, calls
        torch.cuda.empty_cache()


BENCHMARK = Benchmark(
    name="hopper.gqa_decode",
    summary="paged decoding of grouped queries against the read limit, SDPA, the portable kernel and FlashInfer",
    run=run,
)

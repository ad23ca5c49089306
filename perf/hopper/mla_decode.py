"""Latent decoding on a Hopper GPU: bf16, rows of 512 + 64, pages of 64 keys dealt at random.

Each shape has a row for the time that the device needs at least (its bytes at the read rate that is measured in the same run, or
its products at 786 TFLOP/s, which a bf16 product of 8192 cubed reached on an H200), one for the portable Triton kernel, and one for
each of FlashMLA and FlashInfer where they are installed. Times are of CUDA graph replays that walk through several layers' caches
(random data, several times the L2 cache), per layer. Before a shape is timed its result is held against attention in float32, once
as it is and once with a key that dominates: what is not right has no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perf.graph_replay import timed_us
from perf.harness import Benchmark, Context, Row
from perf.hopper.bench import read_rate
from tokenspeed_kernel.ops import mla

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_WIDTH, _LATENT, _PAGE = 576, 512, 64
_SCALE = 192**-0.5
_FLOPS = 786e12
_COSINE, _LSE_ERROR = 0.99999, 1e-3
_OURS = "gluon"
_PEERS = {"triton": "portable Triton", "flash_mla": "FlashMLA", "flashinfer": "FlashInfer"}
_Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests, or of lengths spread from 1024 to `num_keys`; what was promised for it.

    Attributes:
        goal: times the faster of the peers.
        share: of the limit.
    """

    num_requests: int
    num_keys: int
    q_len: int = 1
    num_heads: int = 16
    spread: bool = False
    goal: float | None = None
    share: float | None = None

    def __str__(self) -> str:
        keys = f"kv1024..{self.num_keys}" if self.spread else f"kv{self.num_keys}"
        return f"b{self.num_requests} {keys} s_q{self.q_len} h{self.num_heads}"

    @property
    def lengths(self) -> list[int]:
        """Keys of each request; spread lengths are evenly apart in their logarithm, and shuffled."""
        if not self.spread:
            return [self.num_keys] * self.num_requests
        most = self.num_keys / 1024
        return [int(1024 * most ** (one * 37 % self.num_requests / (self.num_requests - 1))) for one in range(self.num_requests)]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rows that are attended."""
        return 2 * _WIDTH * sum(self.lengths)

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        return 2.0 * sum(self.lengths) * self.q_len * self.num_heads * (_WIDTH + _LATENT)


SHAPES = (
    Shape(1, 65536, goal=2.0),
    Shape(1, 65536, 4, goal=2.0),
    Shape(4, 65536, share=0.85),
    Shape(4, 65536, 4, share=0.85),
    Shape(1, 8192, goal=1.7),
    Shape(1, 1024, goal=1.7),
    Shape(16, 1024, goal=1.7),
    Shape(128, 8192, goal=1.02, share=0.93),
    Shape(64, 65536, spread=True, goal=1.02, share=0.93),
    Shape(16, 8192, 4, 128, goal=1.0),
    Shape(64, 8192, 4, 128, goal=1.0),
)


class Batch:
    """Tensors of a shape: one cache for each layer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        pages = [-(-length // _PAGE) for length in shape.lengths]
        layers = max(2, min(128, -(-_COLD_BYTES // shape.kv_bytes)))
        dealt = torch.randperm(sum(pages), device="cuda").to(torch.int32)
        self.table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32, device="cuda")
        for row, own in zip(self.table, dealt.split(pages), strict=True):
            row[: len(own)] = own
        self.lens = torch.tensor(shape.lengths, dtype=torch.int32, device="cuda")
        size = (shape.num_requests, shape.q_len, shape.num_heads)
        self.q = torch.randn((*size, _WIDTH), dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty((*size, _LATENT), dtype=torch.bfloat16, device="cuda")
        cache = (sum(pages), _PAGE, _WIDTH)
        self.caches = [torch.randn(cache, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        self.plan = mla.plan(self.table, self.lens, page_size=_PAGE, max_seqlen_q=shape.q_len, max_seqlen_k=max(shape.lengths))

    def calls(self, solution: str) -> _Calls:
        """Of the op, one for each layer, with one plan for all."""
        most = max(self.shape.lengths)
        return [
            lambda cache=cache: mla.mla_decode(
                self.q, cache, self.table, self.lens, max_seqlen_k=most, softmax_scale=_SCALE, out=self.out, plan=self.plan,
                solution=solution,
            )
            for cache in self.caches
        ]  # fmt: skip

    def error(self) -> str:
        """What is wrong with our result; empty where it is right."""
        found = self._error(self.caches[0])
        if found:
            return found
        cache = self.caches[0].clone()
        for request in {0, self.shape.num_requests - 1}:
            key = (self.shape.lengths[request] - self.shape.q_len) // 2
            # Along the first query, and long: it takes nearly all the weight of that query.
            long = self.q[request, 0, 0] / self.q[request, 0, 0].float().norm() * math.sqrt(_WIDTH)
            cache[self.table[request, key // _PAGE].long(), key % _PAGE] = long.to(torch.bfloat16)
        return self._error(cache)

    def _error(self, cache: torch.Tensor) -> str:
        most = max(self.shape.lengths)
        got, lse = mla.mla_decode(
            self.q, cache, self.table, self.lens, max_seqlen_k=most, softmax_scale=_SCALE, return_lse=True, plan=self.plan,
            solution=_OURS,
        )  # fmt: skip
        for request in sorted({0, self.shape.num_requests // 2, self.shape.num_requests - 1}):
            length = self.shape.lengths[request]
            keys = torch.arange(length, device="cuda")
            rows = cache[self.table[request].long()[keys // _PAGE], keys % _PAGE].float()
            logits = torch.einsum("shd,nd->shn", self.q[request].float(), rows) * _SCALE
            positions = length - self.shape.q_len + torch.arange(self.shape.q_len, device="cuda")
            logits.masked_fill_(keys > positions[:, None, None], -math.inf)
            want = torch.softmax(logits, -1) @ rows[:, :_LATENT]
            cosine = float(F.cosine_similarity(got[request].double().flatten(), want.double().flatten(), dim=0))
            error = float((lse[request] - torch.logsumexp(logits, -1)).abs().max())
            if not (cosine > _COSINE and error < _LSE_ERROR):
                return f"wrong: cosine {cosine:.7f}, LSE off by {error:.2g} at request {request}"
        return ""


def run(context: Context) -> Iterator[Row]:
    """Yield the rows of each shape; without a Hopper GPU one row that says so."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        yield Row("latent decode on Hopper", None, None, "us", note="needs a GPU of compute capability 9.0; torch sees none")
        return
    rate = read_rate()
    yield Row("read of 2 GiB", rate / 1e12, None, "TB/s")
    repeats = 5 if context.quick else 20
    for shape in SHAPES[4:6] if context.quick else SHAPES:
        limit = max(shape.kv_bytes / rate, shape.flops / _FLOPS) * 1e6
        batch = Batch(shape)
        problem = batch.error()
        if problem:
            yield Row(str(shape), None, limit, "us", "limit", limit, False, note=problem)
            continue
        ours, problem = timed_us(batch.calls(_OURS), repeats)
        yield Row(str(shape), ours, limit, "us", "limit of this run", limit, False, shape.share, problem)
        for solution, name in _PEERS.items():
            figure, problem = timed_us(batch.calls(solution), repeats)
            goal = None if solution == "triton" else shape.goal
            yield Row(str(shape), ours, figure, "us", name, limit, False, goal, problem)
        del batch
        torch.cuda.empty_cache()


BENCHMARK = Benchmark(
    name="hopper.mla_decode",
    summary="latent decoding against the device's limit, the portable kernel, FlashMLA and FlashInfer",
    run=run,
)

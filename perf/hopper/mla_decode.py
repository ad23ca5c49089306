"""Latent decoding on a Hopper GPU: bf16 rows of 512 + 64, and packed rows of fp8, in pages of 64 keys dealt at random.

Our kernel for Hopper beside the portable Triton kernel, FlashMLA and FlashInfer; packed rows, by the kernel that selection takes,
beside our own over bf16. Times are of CUDA graph replays that walk through several layers' caches (random data, several times
the L2 cache), per layer. A result is held against attention in float32 once as it is and once with a key that dominates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import LIMIT, Error, Family, Goal, Peer, Result, Work
from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.ops.mla.packed import row_bytes, unpack_rows

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_WIDTH, _LATENT, _PAGE = 576, 512, 64
_SCALE = 192**-0.5
_OURS = "gluon"
_PEERS = {"triton": "portable Triton", "flash_mla": "FlashMLA", "flashinfer": "FlashInfer"}
_BF16 = "our bf16"
_Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests, or of lengths spread from 1024 to `num_keys`; what was promised for it.

    Attributes:
        goal: times the faster of the peers in `over`.
        share: of the limit.
        packed: rows of fp8 with scales and bf16 rope.
    """

    num_requests: int
    num_keys: int
    q_len: int = 1
    num_heads: int = 16
    spread: bool = False
    goal: float | None = None
    share: float | None = None
    over: tuple[str, ...] = ("FlashMLA", "FlashInfer")
    packed: bool = False

    def __str__(self) -> str:
        keys = f"kv1024..{self.num_keys}" if self.spread else f"kv{self.num_keys}"
        return f"b{self.num_requests} {keys} s_q{self.q_len} h{self.num_heads}{' fp8 latent' if self.packed else ''}"

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
        return (row_bytes(_LATENT, _WIDTH - _LATENT) if self.packed else 2 * _WIDTH) * sum(self.lengths)

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
    Shape(128, 8192, goal=1.02, share=0.93, over=("FlashMLA",)),
    Shape(64, 65536, spread=True, goal=1.02, share=0.93, over=("FlashMLA",)),
    Shape(16, 8192, 4, 128, goal=1.0, over=("FlashMLA",)),
    Shape(64, 8192, 4, 128, goal=1.0, over=("FlashMLA",)),
    Shape(64, 8192, goal=1.6, over=(_BF16,), packed=True),
    Shape(1, 65536, goal=1.6, over=(_BF16,), packed=True),
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
        self.caches = [self._cache(sum(pages)) for _ in range(layers)]
        self.plan = mla.plan(self.table, self.lens, page_size=_PAGE, max_seqlen_q=shape.q_len, max_seqlen_k=max(shape.lengths))

    def _cache(self, num_pages: int) -> torch.Tensor:
        rows = torch.randn((num_pages, _PAGE, _WIDTH), dtype=torch.bfloat16, device="cuda")
        if not self.shape.packed:
            return rows
        packed = torch.empty((num_pages, _PAGE, row_bytes(_LATENT, _WIDTH - _LATENT)), dtype=torch.uint8, device="cuda")
        flat = rows.flatten(0, 1)
        mla.write_mla_cache(flat[:, :_LATENT], flat[:, _LATENT:], packed, torch.arange(len(flat), device="cuda"))
        return packed

    def calls(self, solution: str | None) -> _Calls:
        """Of the op, one for each layer, with one plan for all."""
        most = max(self.shape.lengths)
        return [
            lambda cache=cache: mla.mla_decode(
                self.q, cache, self.table, self.lens, max_seqlen_k=most, softmax_scale=_SCALE, out=self.out, plan=self.plan,
                solution=solution,
            )
            for cache in self.caches
        ]  # fmt: skip

    def error(self) -> Error:
        """How far our result is from attention in float32."""
        found = self._error(self.caches[0])
        if self.shape.packed:
            return found
        cache = self.caches[0].clone()
        for request in {0, self.shape.num_requests - 1}:
            key = (self.shape.lengths[request] - self.shape.q_len) // 2
            # Along the first query, and long: it takes nearly all the weight of that query.
            long = self.q[request, 0, 0] / self.q[request, 0, 0].float().norm() * math.sqrt(_WIDTH)
            cache[self.table[request, key // _PAGE].long(), key % _PAGE] = long.to(torch.bfloat16)
        return found.worst(self._error(cache))

    def _error(self, cache: torch.Tensor) -> Error:
        most = max(self.shape.lengths)
        got, lse = mla.mla_decode(
            self.q, cache, self.table, self.lens, max_seqlen_k=most, softmax_scale=_SCALE, return_lse=True, plan=self.plan,
            solution=None if self.shape.packed else _OURS,
        )  # fmt: skip
        found: Error | None = None
        for request in sorted({0, self.shape.num_requests // 2, self.shape.num_requests - 1}):
            length = self.shape.lengths[request]
            keys = torch.arange(length, device="cuda")
            rows = cache[self.table[request].long()[keys // _PAGE], keys % _PAGE]
            rows = unpack_rows(rows, _LATENT, torch.float32) if self.shape.packed else rows.float()
            logits = torch.einsum("shd,nd->shn", self.q[request].float(), rows) * _SCALE
            positions = length - self.shape.q_len + torch.arange(self.shape.q_len, device="cuda")
            logits.masked_fill_(keys > positions[:, None, None], -math.inf)
            want = torch.softmax(logits, -1) @ rows[:, :_LATENT]
            error = Error.of(got[request], want, lse[request], torch.logsumexp(logits, -1))
            found = error if found is None else found.worst(error)
        assert found is not None
        return found


def work(shape: Shape) -> Work:
    """Rows read once, queries read and results written; what was promised."""
    queries = 2 * shape.num_requests * shape.q_len * shape.num_heads * (_WIDTH + _LATENT)
    goals = [] if shape.goal is None else [Goal(shape.goal, shape.over)]
    if shape.share is not None:
        goals.append(Goal(shape.share, (LIMIT,)))
    return Work(str(shape), shape.kv_bytes + queries, shape.flops, tuple(goals))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of our kernel for Hopper, or of the one that is selected for packed rows, and of all peers."""
    batch = Batch(shape)
    error = batch.error()
    if not shape.packed:
        peers: dict[str, Peer] = {name: lambda which=which: batch.calls(which) for which, name in _PEERS.items()}
        return bench.measured(work(shape), batch.calls(_OURS), peers, error=error, problem=error.problem(), solution=_OURS)
    operands = {"q": batch.q, "kv_cache": batch.caches[0], "page_table": batch.table, "seq_lens": batch.lens}
    solution = chosen(mla.mla_decode, **operands, max_seqlen_k=max(shape.lengths), softmax_scale=_SCALE)
    other = {_BF16: lambda: Batch(replace(shape, packed=False)).calls(_OURS)}
    # The products are of fp8 numbers times their scales, rounded to bf16: no more than that is lost to float32.
    problem = error.problem(cosine=0.9999, lse=1e-2)
    return bench.measured(work(shape), batch.calls(None), other, error=error, problem=problem, solution=solution)


FAMILY = Family(
    "mla_decode",
    "latent decoding against the device's limit, the portable kernel, FlashMLA and FlashInfer",
    SHAPES,
    work,
    measure,
)
BENCHMARK = as_benchmark(FAMILY)

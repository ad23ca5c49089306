"""Latent attention on a CUDA device: paged decode beside FlashMLA and FlashInfer where they are installed, prefill beside PyTorch.

Times are of CUDA graph replays that walk through several layers' caches (random data, more than the L2 cache holds), per layer.
The limit is the time to read the latent rows once at the device's measured copy rate, or the products at its measured matrix rate,
whichever is longer; both are measured in the same run. Without a CUDA device there is one row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perf.graph_replay import device_rates, timed_us
from perf.harness import Benchmark, Context, Row
from tokenspeed_kernel.ops import dsa, mla

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_WIDTH, _LATENT = 576, 512
_SCALE = 192**-0.5
_Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests; ``num_slots`` is 0 for attention to all keys."""

    num_requests: int
    q_len: int
    num_keys: int
    num_heads: int
    page_size: int = 64
    num_slots: int = 0

    def __str__(self) -> str:
        kind = f"sparse {self.num_slots} of" if self.num_slots else "decode"
        return f"{kind} b{self.num_requests} kv{self.num_keys} s_q{self.q_len} h{self.num_heads} page {self.page_size} bf16"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rows that are attended."""
        return 2 * _WIDTH * self.num_requests * (self.q_len * self.num_slots or self.num_keys)

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        pairs = self.num_requests * self.q_len * (self.num_slots or self.num_keys)
        return 2.0 * pairs * self.num_heads * (_WIDTH + _LATENT)


SHAPES = (
    Shape(128, 1, 8192, 16),
    Shape(64, 4, 8192, 128),
    Shape(1, 4, 65536, 16),
    Shape(1, 1, 8192, 16),
    Shape(64, 1, 8192, 16, 16),
    Shape(64, 1, 8192, 128),
    Shape(64, 1, 8192, 128, num_slots=2048),
    Shape(1, 1, 65536, 128, num_slots=2048),
)
PREFILLS = ((8, 4096, 16), (1, 8192, 128))
"""(requests, tokens of each, heads)"""


def _decode(shape: Shape, solutions: tuple[str, ...]) -> dict[str, _Calls]:
    """Calls for each solution, one for each layer."""
    requests, keys, page = shape.num_requests, shape.num_keys, shape.page_size
    layers = max(2, min(16, -(-_COLD_BYTES // shape.kv_bytes)))
    columns = -(-keys // page)
    table = torch.randperm(requests * columns, device="cuda").to(torch.int32).view(requests, columns)
    lens = torch.full((requests,), keys, dtype=torch.int32, device="cuda")
    q = torch.randn((requests, shape.q_len, shape.num_heads, _WIDTH), dtype=torch.bfloat16, device="cuda")
    out = torch.empty((*q.shape[:3], _LATENT), dtype=torch.bfloat16, device="cuda")
    caches = [torch.randn((requests * columns, page, _WIDTH), dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    if shape.num_slots:
        size = (requests, shape.q_len, shape.num_slots)
        slots = torch.randint(requests * columns * page, size, dtype=torch.int32, device="cuda")
        return {
            solution: [
                lambda cache=cache, solution=solution: dsa.sparse_decode(
                    q, cache, slots, softmax_scale=_SCALE, out=out, solution=solution
                )
                for cache in caches
            ]
            for solution in solutions
        }
    made = mla.plan(table, lens, page_size=page, max_seqlen_q=shape.q_len, max_seqlen_k=keys)
    return {
        solution: [
            lambda cache=cache, solution=solution: mla.mla_decode(
                q, cache, table, lens, max_seqlen_k=keys, softmax_scale=_SCALE, out=out, plan=made, solution=solution
            )
            for cache in caches
        ]
        for solution in solutions
    }


def _prefill(requests: int, tokens: int, heads: int) -> tuple[_Calls, _Calls]:
    """Ours over ragged tokens, and PyTorch's over the same as a batch."""
    total, layers = requests * tokens, 2
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
    ours: _Calls = []
    peer: _Calls = []
    for _ in range(layers):
        q, k = torch.randn((2, total, heads, 192), dtype=torch.bfloat16, device="cuda")
        v = torch.randn((total, heads, 128), dtype=torch.bfloat16, device="cuda")
        ours.append(
            lambda q=q, k=k, v=v: mla.mla_prefill(
                q, k, v, starts, starts, max_seqlen_q=tokens, max_seqlen_k=tokens, solution="triton"
            )
        )
        batch = [one.view(requests, tokens, heads, -1).transpose(1, 2) for one in (q, k, v)]
        peer.append(lambda batch=batch: F.scaled_dot_product_attention(*batch, is_causal=True))
    return ours, peer


def run(context: Context) -> Iterator[Row]:
    """Yield one row for each shape and peer; without a CUDA device one row that says so."""
    if not torch.cuda.is_available():
        yield Row("latent attention on CUDA", None, None, "us", note="needs a CUDA device; torch sees none")
        return
    read_rate, product_rate = device_rates()
    repeats = 5 if context.quick else 20
    for shape in SHAPES[2:4] if context.quick else SHAPES:
        peers = () if shape.num_slots else ("flash_mla", "flashinfer")
        limit = max(shape.kv_bytes / read_rate, shape.flops / product_rate) * 1e6
        calls = _decode(shape, ("triton", *peers))
        ours, problem = timed_us(calls["triton"], repeats)
        for peer in peers or ("",):
            figure, reason = timed_us(calls[peer], repeats) if peer else (None, "")
            note = "; ".join(part for part in (problem and f"ours: {problem}", reason and f"{peer}: {reason}") if part)
            yield Row(str(shape), ours, figure, "us", peer, limit, False, note=note)
        del calls
        torch.cuda.empty_cache()
    for requests, tokens, heads in PREFILLS[:1] if context.quick else PREFILLS:
        mine, theirs = _prefill(requests, tokens, heads)
        (ours, problem), (figure, reason) = timed_us(mine, repeats), timed_us(theirs, repeats)
        limit = requests * heads * tokens**2 * (192 + 128) / product_rate * 1e6
        note = "; ".join(part for part in (problem and f"ours: {problem}", reason and f"peer: {reason}") if part)
        name = f"prefill b{requests} x {tokens} h{heads} d192/128 bf16, causal"
        yield Row(name, ours, figure, "us", f"torch {torch.__version__} scaled_dot_product_attention", limit, False, note=note)
        del mine, theirs
        torch.cuda.empty_cache()


BENCHMARK = Benchmark(
    name="kernel.mla",
    summary="latent decode beside FlashMLA and FlashInfer, sparse decode, expanded prefill beside PyTorch, by graph replay",
    run=run,
)

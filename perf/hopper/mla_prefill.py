"""Prefill over expanded latent keys on a Hopper GPU: bf16, causal, heads of 192 with values of 128.

The kernel that selection takes, beside the portable Triton kernel and FlashInfer (fa3). Every measurement starts after a pause of
half a second: see `Bench.measured`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Peer, Result, Work
from tokenspeed_kernel.ops import mla

_FLASHINFER = "FlashInfer fa3"
_HEAD_DIM, _VALUE_DIM = 192, 128
_PAUSE_S = 0.5
_Calls = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Equal requests."""

    num_requests: int
    num_queries: int
    num_keys: int
    num_heads: int

    def __str__(self) -> str:
        cached = self.num_keys - self.num_queries
        return f"{self.num_requests}x{self.num_queries}{f' over {cached}' if cached else ''} h{self.num_heads}"


# 128 heads on one device, or 16 of them on each of 8.
SHAPES = (Shape(1, 8192, 8192, 128), Shape(1, 8192, 8192, 16), Shape(4, 1024, 65536 + 1024, 16))


class Batch:
    """Tensors of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        count, heads = shape.num_requests, shape.num_heads
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q = torch.randn((count * shape.num_queries, heads, _HEAD_DIM), **options)
        self.k = torch.randn((count * shape.num_keys, heads, _HEAD_DIM), **options)
        self.v = torch.randn((count * shape.num_keys, heads, _VALUE_DIM), **options)
        self.out = torch.empty((*self.q.shape[:2], _VALUE_DIM), **options)
        self.starts, self.key_starts = (
            torch.arange(count + 1, dtype=torch.int32, device="cuda") * length for length in (shape.num_queries, shape.num_keys)
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the op."""
        sizes: dict[str, Any] = {"max_seqlen_q": self.shape.num_queries, "max_seqlen_k": self.shape.num_keys}
        return {"q": self.q, "k": self.k, "v": self.v, "cu_seqlens_q": self.starts, "cu_seqlens_k": self.key_starts, **sizes}

    def calls(self, solution: str | None = None) -> _Calls:
        """Of the op: its keys and values are several times the L2 cache."""
        return [lambda: mla.mla_prefill(**self.arguments, out=self.out, solution=solution)] * 2

    def error(self) -> Error:
        """How far some heads of the first and the last request are from attention in float32."""
        shape = self.shape
        got, lse = mla.mla_prefill(**self.arguments, out=self.out, return_lse=True)
        found: Error | None = None
        for request in {0, shape.num_requests - 1}:
            places = torch.arange(shape.num_keys, device="cuda")
            hidden = places > places[shape.num_keys - shape.num_queries :, None]
            rows = slice(request * shape.num_queries, (request + 1) * shape.num_queries)
            keys = slice(request * shape.num_keys, (request + 1) * shape.num_keys)
            for head in range(0, shape.num_heads, max(1, shape.num_heads // 8)):
                logits = self.q[rows, head].float() @ self.k[keys, head].float().T * _HEAD_DIM**-0.5
                logits.masked_fill_(hidden, -torch.inf)
                want = torch.softmax(logits, -1) @ self.v[keys, head].float()
                error = Error.of(got[rows, head], want, lse[rows, head], torch.logsumexp(logits, -1))
                found = error if found is None else found.worst(error)
        assert found is not None
        return found

    def flashinfer(self) -> _Calls:
        """FlashInfer's fa3 with its plan made beforehand.

        Raises:
            ImportError: it is not installed.  RuntimeError, OSError: it cannot compile what it needs.
        """
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend="fa3"
        )
        wrapper.plan(
            self.starts,
            self.key_starts,
            self.shape.num_heads,
            self.shape.num_heads,
            _HEAD_DIM,
            head_dim_vo=_VALUE_DIM,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return [lambda: wrapper.run(self.q, self.k, self.v, out=self.out)] * 2


def work(shape: Shape) -> Work:
    """Queries, keys and values read once, results written; what was promised."""
    dims = _HEAD_DIM + _VALUE_DIM
    size_bytes = 2 * shape.num_requests * shape.num_heads * dims * (shape.num_queries + shape.num_keys)
    seen = shape.num_queries * (shape.num_keys - (shape.num_queries - 1) / 2)
    flops = 2.0 * shape.num_requests * shape.num_heads * dims * seen
    return Work(str(shape), size_bytes, flops, (Goal(1.1, (_FLASHINFER,)),))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of all peers."""
    batch = Batch(shape)
    error = batch.error()
    peers: dict[str, Peer] = {"portable Triton": lambda: batch.calls("triton_mla_prefill"), _FLASHINFER: batch.flashinfer}
    solution = chosen(mla.mla_prefill, **batch.arguments)
    return bench.measured(
        work(shape), batch.calls(), peers, error=error, problem=error.problem(), solution=solution, pause_s=_PAUSE_S
    )


FAMILY = Family(
    "mla_prefill", "causal prefill over expanded latent keys against the portable kernel and FlashInfer", SHAPES, work, measure
)
BENCHMARK = as_benchmark(FAMILY)

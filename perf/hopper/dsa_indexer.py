"""Scores of the indexer on a Hopper GPU: 64 heads of 128 over one key a token, fp8 with a scale for each key, and bf16.

The peer is DeepGEMM, which takes fp8: its kernel over ragged keys for prefill, its paged one for decoding. It leaves what lies
behind a causal query's own position as it is; ours writes -inf there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Result, Work
from tokenspeed_kernel.ops import dsa

_HEADS, _DIM, _PAGE = 64, 128, 64
_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_PEER = "DeepGEMM"
_Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_requests` of `q_len` queries over `num_keys` each; one request of many queries has ragged keys, others pages."""

    num_requests: int
    q_len: int
    num_keys: int
    fp8: bool

    def __str__(self) -> str:
        kind = "prefill" if self.ragged else "decode"
        return f"{kind} b{self.num_requests} q{self.q_len} kv{self.num_keys} {'fp8' if self.fp8 else 'bf16'}"

    @property
    def ragged(self) -> bool:
        return self.q_len > 16


SHAPES = tuple(
    Shape(*sizes, fp8)
    for fp8 in (True, False)
    for sizes in ((1, 1, 65536), (1, 2048, 32768), (1, 4096, 4096), (64, 1, 8192), (16, 4, 32768), (128, 1, 32768))
)


class Batch:
    """Tensors of a shape: one cache of keys for each layer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        tokens, keys = shape.num_requests * shape.q_len, shape.num_requests * shape.num_keys
        dtype = torch.float8_e4m3fn if shape.fp8 else torch.bfloat16
        layers = 2 if shape.ragged else max(2, min(32, _COLD_BYTES // (keys * (132 if shape.fp8 else 256))))
        self.q = torch.randn((tokens, _HEADS, _DIM), device="cuda").to(dtype)
        self.weights = torch.randn((tokens, _HEADS), device="cuda") / _HEADS
        self.keys = [torch.randn((keys, _DIM), device="cuda").to(dtype) for _ in range(layers)]
        self.scale = torch.rand(keys, device="cuda") + 0.1 if shape.fp8 else None
        self.out = torch.empty((tokens, shape.num_keys), device="cuda")
        self.lens = torch.full((shape.num_requests,), shape.num_keys, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(keys // _PAGE, device="cuda").to(torch.int32).view(shape.num_requests, -1)
        self.cu_q = torch.arange(shape.num_requests + 1, dtype=torch.int32, device="cuda") * shape.q_len

    def arguments(self, keys: torch.Tensor) -> dict[str, Any]:
        """Of the op over one layer."""
        shape = self.shape
        common = {
            "q": self.q, "weights": self.weights, "cu_seqlens_q": self.cu_q, "max_seqlen_q": shape.q_len,
            "max_seqlen_k": shape.num_keys,
        }  # fmt: skip
        if shape.ragged:
            ends = torch.tensor([0, shape.num_keys], dtype=torch.int32, device="cuda")
            return {**common, "k": keys, "cu_seqlens_k": ends, "k_scale": self.scale}
        scale = None if self.scale is None else self.scale.view(-1, _PAGE)
        return {**common, "k_cache": keys.view(-1, _PAGE, _DIM), "page_table": self.table, "seq_lens": self.lens, "k_scale": scale}

    @property
    def op(self) -> Callable[..., torch.Tensor]:
        return dsa.indexer_scores_ragged if self.shape.ragged else dsa.indexer_scores

    def calls(self) -> list[_Call]:
        """Of the op, one for each layer."""
        return [lambda given=given: self.op(**given, out=self.out) for given in map(self.arguments, self.keys)]

    def deep_gemm(self) -> list[_Call] | str:
        """DeepGEMM's kernels."""
        if self.scale is None:
            return "takes fp8 alone"
        import deep_gemm

        shape, scale = self.shape, self.scale
        if shape.ragged:
            start = torch.zeros(shape.q_len, dtype=torch.int32, device="cuda")
            end = torch.arange(shape.num_keys - shape.q_len + 1, shape.num_keys + 1, dtype=torch.int32, device="cuda")
            return [
                lambda keys=keys: deep_gemm.fp8_mqa_logits(self.q, (keys, scale), self.weights, start, end, False)
                for keys in self.keys
            ]

        def pack(keys: torch.Tensor) -> torch.Tensor:
            pages = (keys.view(torch.uint8).view(-1, _PAGE * _DIM), scale.view(-1, _PAGE).view(torch.uint8))
            return torch.cat(pages, 1).view(-1, _PAGE, 1, _DIM + 4)

        q = self.q.view(shape.num_requests, shape.q_len, _HEADS, _DIM)
        position = torch.arange(shape.q_len, dtype=torch.int32, device="cuda") - (shape.q_len - 1)
        lens = (self.lens[:, None] + position).contiguous()
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, _PAGE, processors)
        return [
            lambda packed=packed: deep_gemm.fp8_paged_mqa_logits(
                q, packed, self.weights, lens, self.table, schedule, shape.num_keys, False
            )
            for packed in map(pack, self.keys)
        ]

    def error(self) -> Error:
        """Against the sum in float32, of some queries."""
        got = self.op(**self.arguments(self.keys[0]))
        found = None
        for token in sorted({0, got.shape[0] // 2, got.shape[0] - 1}):
            request, query = divmod(token, self.shape.q_len)
            seen = self.shape.num_keys - self.shape.q_len + query + 1
            positions = torch.arange(seen, device="cuda")
            if not self.shape.ragged:
                positions = self.table[request].long()[positions // _PAGE] * _PAGE + positions % _PAGE
            keys = self.keys[0].view(torch.uint8)[positions].view(self.q.dtype) if self.shape.fp8 else self.keys[0][positions]
            want = torch.relu(keys.float() @ self.q[token].float().t()) @ self.weights[token]
            want = want if self.scale is None else want * self.scale[positions]
            assert bool((got[token, seen:] == -torch.inf).all())
            error = Error.of(got[token, :seen], want)
            found = error if found is None else found.worst(error)
        assert found is not None
        return found


def work(shape: Shape) -> Work:
    """Keys and queries read once, scores written; a product for each head and each key that is seen."""
    tokens = shape.num_requests * shape.q_len
    size = shape.num_requests * shape.num_keys * (_DIM + 4 if shape.fp8 else 2 * _DIM)
    size += tokens * _HEADS * (_DIM * (1 if shape.fp8 else 2) + 4) + 4 * tokens * shape.num_keys
    seen = tokens * shape.num_keys - shape.num_requests * shape.q_len * (shape.q_len - 1) // 2
    goals = (Goal(1.1, (_PEER,)),) if shape.fp8 else ()
    return Work(str(shape), size, 2.0 * _HEADS * _DIM * seen, goals, "fp8" if shape.fp8 else "bf16")


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of DeepGEMM."""
    batch = Batch(shape)
    error = batch.error()
    solution = chosen(batch.op, **batch.arguments(batch.keys[0]))
    peers = {_PEER: batch.deep_gemm}
    return bench.measured(work(shape), batch.calls(), peers, error=error, problem=error.problem(), solution=solution)


FAMILY = Family("dsa_indexer", "scores of the indexer in fp8 and bf16 against the limit and DeepGEMM", SHAPES, work, measure)
BENCHMARK = as_benchmark(FAMILY)

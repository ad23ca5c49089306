"""Attention to given slots of the latent cache on a Hopper GPU: bf16 rows of 512 + 64, 2048 slots for each query, 128 and 64 heads.

Peers are the portable Triton kernel and FlashMLA's two sparse kernels for sm_90: the one for prefill, over the same bf16 rows and
slots, and for decoding the one that takes an fp8 cache of 656 bytes a token, over the same slots. Slots of a query are dealt at
random and without repetition over its request's keys. Decoding walks through several layers' caches (several times the L2 cache).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Result, Work
from tokenspeed_kernel.ops import dsa

_WIDTH, _LATENT, _PAGE, _SLOTS = 576, 512, 64, 2048
_SCALE = _WIDTH**-0.5
_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_PREFILL, _DECODE = "FlashMLA sparse, bf16 rows", "FlashMLA sparse decode, fp8 rows"
_Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_requests` of `q_len` queries over `num_keys` each; one request of many queries is prefill."""

    num_requests: int
    q_len: int
    num_keys: int
    num_heads: int

    def __str__(self) -> str:
        if self.prefill:
            return f"prefill {self.q_len} of kv{self.num_keys} h{self.num_heads}"
        return f"decode b{self.num_requests} kv{self.num_keys} s_q{self.q_len} h{self.num_heads}"

    @property
    def prefill(self) -> bool:
        return self.q_len > 16

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.q_len

    @property
    def read_bytes(self) -> int:
        """Of the rows that are named, each once: expected, because queries of one request may share some."""
        unseen = (1 - _SLOTS / self.num_keys) ** self.q_len
        return int(self.num_requests * self.num_keys * (1 - unseen)) * 2 * _WIDTH


SHAPES = (
    Shape(1, 1, 65536, 128),
    Shape(1, 2048, 65536, 128),
    Shape(1, 2048, 65536, 64),
    Shape(1, 2048, 8192, 128),
    Shape(1, 2048, 8192, 64),
    *(Shape(1, 1, 65536, heads) for heads in (64,)),
    *(Shape(batch, 1, 16384, heads) for heads in (128, 64) for batch in (4, 32, 128)),
    Shape(32, 4, 16384, 128),
    Shape(32, 4, 16384, 64),
)


class Batch:
    """Tensors of a shape: one cache for each layer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        tokens, options = shape.num_tokens, {"dtype": torch.bfloat16, "device": "cuda"}
        layers = 2 if shape.prefill else max(2, min(32, -(-_COLD_BYTES // shape.read_bytes)))
        cache = (shape.num_requests * shape.num_keys // _PAGE, _PAGE, _WIDTH)
        layers = max(2, min(layers, (8 << 30) // (2 * cache[0] * _PAGE * _WIDTH)))
        self.caches = [torch.randn(cache, **options) for _ in range(layers)]
        self.q = torch.randn((tokens, shape.num_heads, _WIDTH), **options)
        self.out = torch.empty((tokens, shape.num_heads, _LATENT), **options)
        dealt = [torch.randperm(shape.num_keys, device="cuda")[:_SLOTS] for _ in range(tokens)]
        first = torch.arange(tokens, device="cuda") // shape.q_len * shape.num_keys
        self.slots = (torch.stack(dealt) + first[:, None]).to(torch.int32)

    def by_request(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] as [requests, queries, ...], as decoding takes it."""
        return tensor if self.shape.prefill else tensor.unflatten(0, (self.shape.num_requests, self.shape.q_len))

    def calls(self, solution: str | None) -> list[_Call]:
        """Of the op, one for each layer."""
        op = dsa.sparse_prefill if self.shape.prefill else dsa.sparse_decode
        q, slots, out = self.by_request(self.q), self.by_request(self.slots), self.by_request(self.out)
        return [
            lambda cache=cache: op(q, cache, slots, softmax_scale=_SCALE, out=out, solution=solution)  # type: ignore[call-overload]
            for cache in self.caches
        ]

    def flash_mla(self) -> list[_Call]:
        """FlashMLA's kernel for prefill, which has no split over slots."""
        from flash_mla import flash_mla_sparse_fwd

        slots = self.slots[:, None]
        options = {"use_legacy": True, "return_log2_lse": False}  # of its newest wheels: where the kernels for sm_90 are
        return [
            lambda rows=rows: flash_mla_sparse_fwd(self.q, rows, slots, _SCALE, **options)
            for rows in [cache.view(-1, 1, _WIDTH) for cache in self.caches]
        ]

    def flash_mla_fp8(self) -> list[_Call]:
        """FlashMLA's kernel for decoding: a token is 512 fp8 elements, their four scales, and 64 bf16 elements."""
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        def pack(cache: torch.Tensor) -> torch.Tensor:
            latent = cache[..., :_LATENT].to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.ones((*cache.shape[:2], 4), device="cuda").view(torch.uint8)
            rope = cache[..., _LATENT:].contiguous().view(torch.uint8)
            return torch.cat((latent, scales, rope), -1).unsqueeze(2).view(torch.float8_e4m3fn)

        q, slots, schedule = self.by_request(self.q), self.by_request(self.slots), get_mla_metadata()[0]
        return [
            lambda packed=packed: flash_mla_with_kvcache(
                q, packed, None, None, _LATENT, schedule, None, _SCALE, False, True, slots, use_legacy=True
            )
            for packed in map(pack, self.caches)
        ]

    def error(self) -> Error:
        """Against attention in float32, as it is and with a key that dominates one query."""
        found = self._error()
        # At a border of tiles, along the first query and long.
        long = self.q[0, 0] / self.q[0, 0].float().norm() * _WIDTH**0.5
        slot = int(self.slots[0, 1024])
        row = self.caches[0].view(-1, _WIDTH)[slot]
        kept = row.clone()
        row.copy_(long)
        found = found.worst(self._error())
        row.copy_(kept)
        return found

    def _error(self) -> Error:
        op = dsa.sparse_prefill if self.shape.prefill else dsa.sparse_decode
        cache = self.caches[0]
        got, lse = op(self.by_request(self.q), cache, self.by_request(self.slots), softmax_scale=_SCALE, return_lse=True)
        if not self.shape.prefill:
            got, lse = got.flatten(0, 1), lse.flatten(0, 1)
        rows = sorted({0, self.shape.num_tokens // 2, self.shape.num_tokens - 1})
        keys = cache.view(-1, _WIDTH)[self.slots[rows].long()].float()
        logits = torch.einsum("thd,tnd->thn", self.q[rows].float(), keys) * _SCALE
        want = torch.softmax(logits, -1) @ keys[..., :_LATENT]
        return Error.of(got[rows], want, lse[rows], torch.logsumexp(logits, -1))


def work(shape: Shape) -> Work:
    """Rows that are named, each once, queries and results; two products for each slot and head."""
    rows = 2 * shape.num_tokens * shape.num_heads * (_WIDTH + _LATENT) + 4 * shape.num_tokens * _SLOTS
    flops = 2.0 * shape.num_tokens * shape.num_heads * _SLOTS * (_WIDTH + _LATENT)
    peers = (_PREFILL,) if shape.prefill else (_PREFILL, _DECODE)
    return Work(str(shape), shape.read_bytes + rows, flops, (Goal(1.1, peers),))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of all peers."""
    batch = Batch(shape)
    error = batch.error()
    op = dsa.sparse_prefill if shape.prefill else dsa.sparse_decode
    operands = {"q": batch.by_request(batch.q), "kv_cache": batch.caches[0], "slots": batch.by_request(batch.slots)}
    solution = chosen(op, **operands, softmax_scale=_SCALE)
    peers: dict[str, Callable[[], list[_Call]]] = {"portable Triton": lambda: batch.calls("triton"), _PREFILL: batch.flash_mla}
    if not shape.prefill:
        peers[_DECODE] = batch.flash_mla_fp8
    return bench.measured(work(shape), batch.calls(None), peers, error=error, problem=error.problem(), solution=solution)


FAMILY = Family("dsa_sparse", "attention to 2048 given slots against FlashMLA and the portable kernel", SHAPES, work, measure)
BENCHMARK = as_benchmark(FAMILY)

"""Rotation, quantization and cache write in one kernel on a Hopper GPU, beside the kernels that do it one after the other.

New tokens of 32/8 heads of 128 into a paged cache of bf16 or fp8 (pages of 16), and of latent rows of 512 + 64 with the rope parts
of 16 or 128 query heads (pages of 64). The separate kernels are the library's own, those that it takes on this device:
`rope.apply_rope`, then `kvcache.write_kv`, `write_scaled_kv` or `mla.write_mla_cache`; with fp8, also three: rotation,
`quantize_kv`, and a copy of the bytes. Times are of CUDA graph replays over several sets of tensors, several times the L2 cache.

What can be won: few tokens are launches and nothing else, two of which become one. Many tokens are bytes: at 32/8 heads of 128 in
bf16 24 KB a token instead of 28, so that no more than 1.17 times is there to be had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Peer, Result, Work
from tokenspeed_kernel.ops import kvcache, mla, rope

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_MAX_POSITION = 65536
_SEPARATE = "separate kernels"
_Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """New tokens: of grouped queries, or, with a latent_dim, of latent rows."""

    num_tokens: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    latent_dim: int = 0
    fp8: bool = False

    def __str__(self) -> str:
        if self.latent_dim:
            return f"{self.num_tokens} tokens, {self.num_heads} heads, latent rows of {self.latent_dim} + {self.head_dim}"
        stored = "fp8" if self.fp8 else "bf16"
        return f"{self.num_tokens} tokens, {self.num_heads}/{self.num_kv_heads} d{self.head_dim}, {stored} cache"

    @property
    def size_bytes(self) -> int:
        """Read and written at least: new rows, angles, positions and slots."""
        lists = self.head_dim * 4 + 16
        queries = 2 * 2 * self.num_heads * self.head_dim
        if self.latent_dim:
            return self.num_tokens * (queries + 2 * 2 * (self.latent_dim + self.head_dim) + lists)
        keys = 2 * self.num_kv_heads * self.head_dim
        return self.num_tokens * (queries + keys * (2 + (1 if self.fp8 else 2)) + lists)


_TOKENS = (1, 16, 64, 256, 1024, 4096)
SHAPES = (
    *(Shape(tokens, fp8=fp8) for fp8 in (False, True) for tokens in _TOKENS),
    *(Shape(tokens, heads, 1, 64, 512) for heads in (16, 128) for tokens in (1, 64, 4096)),
)


def work(shape: Shape) -> Work:
    """Bytes alone."""
    return Work(str(shape), shape.size_bytes, 0.0, (Goal(2.0, (_SEPARATE,)),))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of the separate ones."""
    layers = max(2, min(128, -(-_COLD_BYTES // shape.size_bytes)))
    made = [_latent(shape) if shape.latent_dim else _heads(shape) for _ in range(layers)]
    op = mla.rope_write_mla if shape.latent_dim else kvcache.rope_write_kv
    first = made[0]
    solution = chosen(op, **first)
    # Held against the float64 reference on some of the tokens; the caches of both start out alike.
    few = {name: _some(name, value) for name, value in first.items()}
    other = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in few.items()}
    error = Error.of(op(**few), op(**other, solution="reference"))
    for name in ("kv_cache",) if shape.latent_dim else ("k_cache", "v_cache"):
        error = error.worst(Error.of(few[name].float(), other[name].float()))
    out = torch.empty_like(first["q_rope" if shape.latent_dim else "q"])
    peers: dict[str, Peer] = {_SEPARATE: lambda: [_separate(shape, one, out) for one in made]}
    if shape.fp8:
        peers["three kernels"] = lambda: [_three(one, out) for one in made]
    peers["portable Triton"] = [lambda one=one: op(**one, q_out=out, solution="triton") for one in made]
    ours = [lambda one=one: op(**one, q_out=out) for one in made]
    # One step of fp8 where a quotient lies in the middle of two: a cosine of all elements, not a bound on each.
    problem = error.problem(cosine=0.9999 if shape.fp8 else 0.99999)
    return bench.measured(work(shape), ours, peers, error=error, problem=problem, solution=solution)


@functools.cache
def _table(rotary_dim: int) -> torch.Tensor:
    """One for all layers, as a model has it."""
    return rope.rope_cos_sin(rope.RopeConfig(rotary_dim, rotary_dim), _MAX_POSITION, device="cuda")


def _lists(shape: Shape, num_slots: int) -> dict[str, torch.Tensor]:
    return {
        "positions": torch.randint(0, _MAX_POSITION, (shape.num_tokens,), device="cuda"),
        "cos_sin_cache": _table(shape.head_dim),
        "slot_mapping": torch.randperm(num_slots, device="cuda")[: shape.num_tokens],
    }


def _heads(shape: Shape) -> dict[str, Any]:
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    size = (shape.num_tokens, sum(heads), shape.head_dim)
    q, k, v = torch.randn(size, dtype=torch.bfloat16, device="cuda").split(heads, 1)
    pages = max(4, -(-2 * shape.num_tokens // 16))
    stored = torch.float8_e4m3fn if shape.fp8 else torch.bfloat16
    k_cache, v_cache = torch.zeros((2, pages, 16, shape.num_kv_heads, shape.head_dim), dtype=stored, device="cuda")
    scales = {"k_scale": torch.full([], 0.02, device="cuda"), "v_scale": torch.full([], 0.03, device="cuda")} if shape.fp8 else {}
    return {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **_lists(shape, pages * 16), **scales}


def _latent(shape: Shape) -> dict[str, Any]:
    width = shape.latent_dim + shape.head_dim
    q = torch.randn((shape.num_tokens, shape.num_heads, width), dtype=torch.bfloat16, device="cuda")
    rows = torch.randn((shape.num_tokens, width), dtype=torch.bfloat16, device="cuda")
    pages = max(2, -(-2 * shape.num_tokens // 64))
    return {
        "q_rope": q[:, :, shape.latent_dim :],
        "k_rope": rows[:, shape.latent_dim :],
        "latent": rows[:, : shape.latent_dim],
        "kv_cache": torch.zeros((pages, 64, width), dtype=torch.bfloat16, device="cuda"),
        "interleaved": True,
        **_lists(shape, pages * 64),
    }


def _some(name: str, value: Any) -> Any:
    """At most 64 tokens of an operand; caches, tables and scales whole, caches as a copy."""
    if not isinstance(value, torch.Tensor):
        return value
    if name.endswith("cache") and name != "cos_sin_cache":
        return value.clone()
    return value if name == "cos_sin_cache" or value.dim() == 0 else value[:64]


def _separate(shape: Shape, one: dict[str, Any], out: torch.Tensor) -> _Call:
    if shape.latent_dim:
        key = torch.empty_like(one["k_rope"][:, None])

        def latent() -> None:
            options = {"interleaved": one["interleaved"], "q_out": out, "k_out": key}
            rope.apply_rope(one["q_rope"], one["k_rope"][:, None], one["positions"], one["cos_sin_cache"], **options)
            mla.write_mla_cache(one["latent"], key[:, 0], one["kv_cache"], one["slot_mapping"])

        return latent
    keys = torch.empty_like(one["k"])
    scales = {name: one[name] for name in ("k_scale", "v_scale") if name in one}

    def heads() -> None:
        rope.apply_rope(one["q"], one["k"], one["positions"], one["cos_sin_cache"], q_out=out, k_out=keys)
        kvcache.write_kv(keys, one["v"], one["k_cache"], one["v_cache"], one["slot_mapping"], **scales)

    return heads


def _three(one: dict[str, Any], out: torch.Tensor) -> _Call:
    keys = torch.empty_like(one["k"])
    stored = torch.empty((2, *keys.shape), dtype=torch.float8_e4m3fn, device="cuda")
    # Pairs of fp8 numbers as numbers of 16 bits, which the write copies as they are.
    pairs = [tensor.view(torch.float16) for tensor in (stored[0], stored[1], one["k_cache"], one["v_cache"])]

    def call() -> None:
        rope.apply_rope(one["q"], one["k"], one["positions"], one["cos_sin_cache"], q_out=out, k_out=keys)
        kvcache.quantize_kv(keys, one["v"], one["k_scale"], one["v_scale"], k_out=stored[0], v_out=stored[1])
        kvcache.write_kv(*pairs, one["slot_mapping"])

    return call


FAMILY = Family(
    "rope_write",
    "rotation, quantization and cache write in one kernel against one kernel each",
    SHAPES,
    work,
    measure,
)
BENCHMARK = as_benchmark(FAMILY)

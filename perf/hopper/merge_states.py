"""Merging of two attention states on a Hopper GPU: bf16, 32 heads of 128, beside FlashInfer's and the portable kernel.

Times are of CUDA graph replays over several sets of states, several times the L2 cache. From some 4,000 tokens on both kernels are
at what the memory gives, and no ratio is left to be won.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Result, Work
from tokenspeed_kernel.ops import attention

_COLD_BYTES = 256 << 20
"""Several times the L2 cache of an H200 (50 MB)."""
_HEADS, _HEAD_DIM = 32, 128
_States = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens whose two states become one."""

    num_tokens: int

    @property
    def size_bytes(self) -> int:
        """Two states read, one written, each with its LSE."""
        return 3 * self.num_tokens * _HEADS * (2 * _HEAD_DIM + 4)


SHAPES = tuple(Shape(tokens) for tokens in (1, 16, 64, 128, 512, 4096))


def work(shape: Shape) -> Work:
    """Bytes alone."""
    return Work(f"{shape.num_tokens} tokens, {_HEADS} heads d{_HEAD_DIM}", shape.size_bytes, 0.0, (Goal(1.2, ("FlashInfer",)),))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of both peers."""
    sets = max(2, min(256, -(-_COLD_BYTES // shape.size_bytes)))
    made = [_states(shape) for _ in range(sets)]
    outs, lses = made[0]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    solution = chosen(attention.merge_states, outs=outs, lses=lses)
    got, got_lse = attention.merge_states(outs, lses)
    weights = torch.softmax(torch.stack(lses).double(), 0)
    want = (torch.stack(outs).double() * weights[..., None]).sum(0)
    error = Error.of(got, want, got_lse, torch.logsumexp(torch.stack(lses).double(), 0))
    ours = [lambda one=one: attention.merge_states(*one, out=out, lse_out=lse) for one in made]
    portable = [lambda one=one: attention.merge_states(*one, out=out, lse_out=lse, solution="triton") for one in made]
    peers = {"FlashInfer": lambda: _flashinfer(made), "portable Triton": portable}
    return bench.measured(work(shape), ours, peers, error=error, problem=error.problem(), solution=solution)


def _states(shape: Shape) -> _States:
    size = (shape.num_tokens, _HEADS, _HEAD_DIM)
    outs = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    return outs, [torch.randn(size[:2], device="cuda") for _ in range(2)]


def _flashinfer(made: list[_States]) -> list[Callable[[], object]]:
    import flashinfer

    return [lambda o=o, s=s: flashinfer.merge_state(o[0], s[0], o[1], s[1]) for o, s in made]


FAMILY = Family("merge_states", "merging of two attention states against FlashInfer's", SHAPES, work, measure)
BENCHMARK = as_benchmark(FAMILY)

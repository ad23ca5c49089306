"""What a public op costs beyond its kernel: shape checks, table look-up and the calls between.

The kernel is replaced by a function that does nothing, in the op's own table, so that the difference of two such times is
the overhead alone: next to a real kernel of 10 us it would drown in noise.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from perf.harness import Benchmark, Context, Row
from tokenspeed_kernel import dispatch
from tokenspeed_kernel.ops.attention import plan

GOAL_US = 2.0
"""What was promised: less than this over a direct call."""
_CALLS = 200


def _cases() -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """Yield (op, what is passed, positional arguments, keyword arguments); the shapes do not matter."""
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    matrix, bias, ids = torch.randn(32, 64), torch.randn(32), torch.zeros(4, dtype=torch.int64)
    yield "norm.rms_norm", "", (x, weight), {"eps": 1e-5}
    yield "norm.rms_norm", "out", (x, weight), {"eps": 1e-5, "out": torch.empty(4, 64)}
    yield "norm.fused_add_rms_norm", "", (x, residual, weight), {"eps": 1e-5}
    outs = {"out": torch.empty(4, 64), "residual_out": torch.empty(4, 64)}
    yield "norm.fused_add_rms_norm", "out, residual_out", (x, residual, weight), {"eps": 1e-5, **outs}
    yield "gemm.mm", "", (x, matrix), {}
    yield "gemm.mm", "bias, out", (x, matrix, bias), {"out": torch.empty(4, 32)}
    yield "activation.silu_and_mul", "", (x,), {}
    yield "embedding.embedding", "", (ids, matrix), {}
    yield "embedding.embedding", "out", (ids, matrix), {"out": torch.empty(4, 64)}
    q, k, table = torch.randn(4, 2, 32), torch.randn(4, 1, 32), torch.randn(16, 32)
    yield "rope.apply_rope", "", (q, k, ids, table), {}
    cache = torch.zeros(4, 16, 1, 32)
    yield "kvcache.write_kv", "", (k, k, cache, cache.clone(), ids), {}
    pages, lengths = torch.zeros(4, 4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    yield "attention.mha_decode", "", (q, cache, cache, pages, lengths), {"max_seqlen_k": 9}
    made = plan(pages, lengths, page_size=16, max_seqlen_k=9)
    yield "attention.mha_decode", "plan", (q, cache, cache, pages, lengths), {"max_seqlen_k": 9, "plan": made}


def _empty_like(kernel: Callable[..., Any], result: object) -> Callable[..., Any]:
    """A function with the kernel's own parameters and defaults that only returns `result`.

    A stand-in with `**kwargs` would build a dictionary at each call, which no kernel does.
    """
    signature = inspect.signature(kernel, eval_str=False)
    plain = [
        one.replace(annotation=inspect.Parameter.empty, default=one.empty if one.default is one.empty else _Default(index))
        for index, one in enumerate(signature.parameters.values())
    ]
    defaults = {f"default_{index}": one.default for index, one in enumerate(signature.parameters.values())}
    namespace: dict[str, Any] = {"result": result, **defaults}
    header = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    exec(f"def empty_kernel{header}:\n    return result", namespace)
    return cast(Callable[..., Any], namespace["empty_kernel"])


@dataclass(frozen=True)
class _Default:
    """Shows as the name under which the default value is found."""

    index: int

    def __repr__(self) -> str:
        return f"default_{self.index}"


def _with_empty_kernel(public: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Bind the op for these arguments, then put a function that does nothing in the kernel's place in its table."""
    dispatch.reset()
    result = public(*args, **kwargs)
    (op,) = (op for op in dispatch.bound_ops() if op.table)
    ((key, kernel),) = op.table.items()
    op.table[key] = _empty_like(kernel, result)
    return op.table[key]


def _samples_us(ours: Callable[[], None], direct: Callable[[], None], count: int) -> tuple[list[float], list[float]]:
    """Time both in turn, `count` times. A neighbour on the machine only ever adds to a sample: the least is the op's own."""
    samples: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    try:
        for _ in range(count):
            for function, times in zip((ours, direct), samples, strict=True):
                start = time.perf_counter()
                for _ in range(_CALLS):
                    function()
                times.append((time.perf_counter() - start) / _CALLS * 1e6)
    finally:
        gc.enable()
    return samples


def run(context: Context) -> Iterator[Row]:
    """Yield one row for each op: microseconds over a direct call of the kernel with the same arguments."""
    from tokenspeed_kernel.testing import public_op

    for op, passed, args, kwargs in _cases():
        label = f"{op}({passed})"
        public = public_op(op)
        empty_kernel = _with_empty_kernel(public, args, kwargs)

        def ours(public: Any = public, args: Any = args, kwargs: Any = kwargs) -> None:
            public(*args, **kwargs)

        def direct(kernel: Any = empty_kernel, args: Any = args, kwargs: Any = kwargs) -> None:
            kernel(*args, **kwargs)

        samples = _samples_us(ours, direct, 20 if context.quick else 300)
        least, usual = (reduce(samples[0]) - reduce(samples[1]) for reduce in (min, statistics.median))
        note = f"over a direct call, least of many samples; median {usual:.2f}; limit is the goal"
        yield Row(label, least, None, "us", limit=GOAL_US, note=note)
    dispatch.reset()


BENCHMARK = Benchmark(name="kernel.dispatch", summary="public eager op over a direct call of its kernel", run=run)

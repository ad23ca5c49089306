"""What a public op costs beyond its kernel: shape checks, table look-up and the calls between.

The kernel is replaced by a function that does nothing, in the op's own table, so that the difference of two such times is
the overhead alone: next to a real kernel of 10 us it would drown in noise.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed

from perf.harness import Benchmark, Context, Row
from tokenspeed_kernel import dispatch
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.attention import plan
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.testing import family_cases, public_op
from tokenspeed_kernel.testing.tensors import tensors_of

GOAL_US = 2.0
"""What was promised: less than this over a direct call."""
_CALLS = 200


Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Op, what is special about the call, positional arguments, keyword arguments."""


def _typical() -> Iterator[Call]:
    """Calls as a model makes them; the sizes do not matter."""
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
    keys, values = torch.zeros(4, 16, 1, 32), torch.zeros(4, 16, 1, 32)
    yield "kvcache.write_kv", "", (k, torch.randn(4, 1, 32), keys, values, ids), {}
    pages, lengths = torch.zeros(4, 4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    yield "attention.mha_decode", "", (q, keys, values, pages, lengths), {"max_seqlen_k": 9}
    made = plan(pages, lengths, page_size=16, max_seqlen_k=9)
    yield "attention.mha_decode", "plan", (q, keys, values, pages, lengths), {"max_seqlen_k": 9, "plan": made}
    starts = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    ragged = plan(pages, lengths, starts, page_size=16, max_seqlen_k=9)
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 9, "plan": ragged}
    yield "attention.mha_extend", "plan", (q, keys, values, pages, starts, lengths), sizes


def _of_cases(op: str) -> Call | None:
    """The smallest call among the op's cases that computes something, with contiguous operands if any has; None without one."""
    found: list[tuple[bool, int, Case, dict[str, Any]]] = []
    for case in family_cases(op.partition(".")[0]):
        if case.op == op and not case.bench:
            inputs = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), (case.dtypes or (torch.float32,))[0])
            tensors = [tensor for _, tensor in tensors_of(inputs)]
            if tensors and all(tensor.numel() for tensor in tensors):
                strided = not all(tensor.is_contiguous() for tensor in tensors)
                found.append((strided, sum(tensor.numel() for tensor in tensors), case, inputs))
    if not found:
        return None
    _, _, case, inputs = min(found, key=lambda one: one[:2])
    label = case.label
    if op.startswith("sampling.") and case.outputs:  # these make an absent output themselves; elsewhere the kernel does
        results = public_op(op)(**inputs)
        inputs |= zip(case.outputs, results if isinstance(results, tuple) else (results,), strict=True)
        label += f", {', '.join(case.outputs)}"
    if "group" in inputs:  # the group itself, as a model holds it, and equal shares
        inputs = {name: value for name, value in inputs.items() if not name.endswith("sizes")}
        inputs["group"] = torch.distributed.group.WORLD
        label = "one process"
    parameters = inspect.signature(public_op(op)).parameters
    leading = list(itertools.takewhile(lambda name: name in inputs, parameters))
    positional = [name for name in leading if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keywords = {name: value for name, value in inputs.items() if name not in positional}
    return op, label, tuple(inputs[name] for name in positional), keywords


def calls() -> Iterator[Call]:
    """Yield one or more calls of every op of the registry: the typical ones above, or else one from the op's cases."""
    typical = list(_typical())
    yield from typical
    named = {call[0] for call in typical}
    for op in collect_builtin().ops():
        call = None if op in named else _of_cases(op)
        if call is not None:
            yield call


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


def _with_empty_kernel(
    name: str, public: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], object]:
    """Bind the op for these arguments, put a function that does nothing in the kernel's place, and return a call of that function.

    The call has the arguments that the op gives to its kernel, in the same way.
    """
    dispatch.reset()
    result = public(*args, **kwargs)
    # A kernel may call other ops, which are bound then too.
    (op,) = (op for op in dispatch.bound_ops() if op.table and op.contract.name == name)
    (kernel,) = op.table.values()
    received: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def spy(*got: Any, **named: Any) -> Any:
        received.append((got, named))
        return result

    _replace(op, spy)
    public(*args, **kwargs)
    ((got, named),) = received
    empty = _empty_like(kernel, result)
    _replace(op, empty)

    def direct() -> None:
        empty(*got, **named)

    return direct


def _replace(op: dispatch.BoundOp, kernel: Callable[..., Any]) -> None:
    """Put it into the op's own tables, to which its module has references."""
    op.table.update(dict.fromkeys(op.table, kernel))
    op.seen.update({key: (looks_same, kernel) for key, (looks_same, _) in op.seen.items()})


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
    for op, passed, args, kwargs in calls():
        label = f"{op}({passed})"
        public = public_op(op)
        direct = _with_empty_kernel(op, public, args, kwargs)

        def ours(public: Any = public, args: Any = args, kwargs: Any = kwargs) -> None:
            public(*args, **kwargs)

        samples = _samples_us(ours, direct, 20 if context.quick else 300)
        least, usual = (reduce(samples[0]) - reduce(samples[1]) for reduce in (min, statistics.median))
        note = f"over a direct call, least of many samples; median {usual:.2f}; limit is the goal"
        yield Row(label, least, None, "us", limit=GOAL_US, note=note)
    dispatch.reset()


BENCHMARK = Benchmark(name="kernel.dispatch", summary="public eager op over a direct call of its kernel", run=run)

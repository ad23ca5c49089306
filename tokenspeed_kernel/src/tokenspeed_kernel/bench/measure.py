"""Times every eligible kernel of an op on its cases, beside what PyTorch itself has for it, and against the measured limits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch

from tokenspeed_kernel.bench.limits import Limits
from tokenspeed_kernel.bench.peers import PEERS
from tokenspeed_kernel.bench.timing import Timing, rotating_copies, size_of, time_calls
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.platform import platform_of
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, Verdict, evaluate
from tokenspeed_kernel.spec import Band, KernelSpec
from tokenspeed_kernel.testing.conformance import public_op
from tokenspeed_kernel.testing.tensors import map_tensors
from tokenspeed_kernel.testing.verify import DTYPES, cases_of

__all__ = ["BenchOptions", "Measured", "Row", "bench", "case_dtypes", "eligible_kernels", "measure_case", "work_of"]

_FP8: Final = ("fp8", "mxfp8")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is timed, and where.

    Args:
        ops: names of ops.
        solutions: only kernels of these solutions; empty for all.
        kernels: only these kernels; empty for all.
        cases: only cases with one of these labels; empty for all that are meant for timing.
        dtypes: only these; empty for bf16 on a GPU and fp32 on a CPU.
        device: to run on.
        samples: for each kernel.
        copies: most copies of the inputs; they rotate so that the cache is cold.
    """

    ops: tuple[str, ...]
    solutions: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    samples: int = 20
    copies: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one case.

    Attributes:
        op, case, dtype: what was called.
        kernel: name; `torch: ...` for what PyTorch itself has.
        time_us, noise_us, how: see `Timing`; the median on a GPU, the best on a CPU.
        moved_bytes, flops: least work of the call.
        limit_us: time that the measured limits allow for that work; `bound` says which limit.
        share: limit_us / time_us.
        chosen: it is what selection takes for this call.
        note: why there is no time, or that the cache was warm.
    """

    op: str
    case: str
    dtype: str
    kernel: str
    time_us: float | None
    noise_us: float | None
    how: str
    moved_bytes: int
    flops: int | None
    limit_us: float
    bound: str
    share: float | None
    chosen: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Measured:
    """Timings of one case.

    Attributes:
        request: what it asked selection for.
        moved_bytes, flops: least work of the call.
        cold: the inputs rotated through more memory than the cache holds.
        timings: a timing or an exception for each kernel, in order of rank.
    """

    request: Request
    moved_bytes: int
    flops: int | None
    cold: bool
    timings: dict[str, Timing | Exception]


def bench(options: BenchOptions, limits: Limits, registry: Registry) -> Iterator[Row]:
    """Yield a row for each eligible kernel on each case, in order of op, case and rank."""
    for op in options.ops:
        for case in cases_of(op):
            if case.label not in options.cases if options.cases else not case.bench:
                continue
            for dtype in case_dtypes(case, options):
                measured = measure_case(case, dtype, registry, options, peers=True)
                if measured is not None:
                    yield from _rows(case, dtype, measured, limits, registry, options)


def measure_case(
    case: Case, dtype: torch.dtype, registry: Registry, options: BenchOptions, *, peers: bool = False
) -> Measured | None:
    """Time every eligible kernel on a case against each other; None where none is eligible or the op refuses the case.

    Args:
        case: to build the inputs from.
        dtype: of the inputs.
        registry: of the kernels.
        options: device, filters and samples.
        peers: time PyTorch's own function too.
    """
    function = public_op(case.op)
    inputs = case.build(torch.Generator().manual_seed(0), options.device, dtype)
    try:
        request = request_of(function, inputs)
    except ShapeError:
        return None
    if request is None:
        return None
    specs = [
        spec
        for spec in eligible_kernels(registry, request, options.device)
        if (not options.solutions or spec.solution in options.solutions) and (not options.kernels or spec.name in options.kernels)
    ]
    if not specs:
        return None
    result = function(**inputs, solution=specs[0].name)
    moved, flops = work_of(case, inputs, result)
    copies, cold = rotating_copies(inputs, options.device, moved, most=options.copies)
    given = _outputs(case, result, len(copies))
    calls: dict[str, Callable[[int], object]] = {spec.name: _call(function, spec.name, copies, given) for spec in specs}
    if peers and case.op in PEERS:
        peer = PEERS[case.op]
        calls[f"torch: {peer.name}"] = lambda number: peer.run(**copies[number])
    timings = time_calls(calls, len(copies), options.device, samples=options.samples)
    return Measured(request, moved, flops, cold, timings)


def eligible_kernels(registry: Registry, request: Request, device: torch.device) -> list[KernelSpec]:
    """Kernels that qualify for a request on a device, in order of rank, without the reference."""
    asked = replace(request, platform=platform_of(device), config=replace(KernelConfig.from_env(), tuning=""))
    candidates = evaluate(registry, asked)
    return [one.spec for one in candidates if one.verdict is Verdict.ELIGIBLE and one.spec.band is not Band.REFERENCE]


def work_of(case: Case, inputs: dict[str, Any], result: Any) -> tuple[int, int | None]:
    """Bytes that a call must move and its floating-point operations: of the case, else of the family's `costs.py`, else counted."""
    cost = _costs(case.op)
    count_bytes = case.moved_bytes or (cost.moved_bytes if cost else None)
    count_flops = case.flops or (cost.flops if cost else None)
    if count_bytes is not None:
        moved = count_bytes(inputs, result)
    else:
        moved = size_of(inputs) + size_of(result) + size_of({name: inputs[name] for name in case.mutated})
    return moved, None if count_flops is None else count_flops(inputs)


def _costs(op: str) -> Any:
    module = f"tokenspeed_kernel.ops.{op.partition('.')[0]}.costs"
    if importlib.util.find_spec(module) is None:
        return None
    return importlib.import_module(module).COSTS.get(op)


def case_dtypes(case: Case, options: BenchOptions) -> tuple[torch.dtype, ...]:
    """Dtypes in which a case is timed."""
    usual = torch.bfloat16 if options.device.type == "cuda" else torch.float32
    taken = case.dtypes or DTYPES
    if options.dtypes:
        return tuple(dtype for dtype in options.dtypes if dtype in taken)
    return (usual,) if usual in taken else taken[:1]


def _outputs(case: Case, result: Any, count: int) -> list[dict[str, Any]]:
    """Given outputs for each copy, so that no call allocates; none where a result is not a tensor to be given."""
    results = result if isinstance(result, tuple) else (result,)
    if not case.outputs or len(results) != len(case.outputs):
        return [{} for _ in range(count)]
    made = dict(zip(case.outputs, results, strict=True))
    return [map_tensors(made, torch.empty_like) for _ in range(count)]


def _call(
    function: Callable[..., Any], solution: str, copies: list[dict[str, Any]], given: list[dict[str, Any]]
) -> Callable[[int], object]:
    arguments = [{**inputs, **outputs, "solution": solution} for inputs, outputs in zip(copies, given, strict=True)]
    return lambda number: function(**arguments[number])


def _rows(
    case: Case, dtype: torch.dtype, measured: Measured, limits: Limits, registry: Registry, options: BenchOptions
) -> Iterator[Row]:
    moved, flops = measured.moved_bytes, measured.flops
    limit_us, bound = limits.time_us(moved, flops, _kind(measured.request, dtype, limits))
    request = replace(measured.request, platform=platform_of(options.device), config=KernelConfig.from_env())
    chosen = next((one.spec.name for one in evaluate(registry, request) if one.verdict is Verdict.ELIGIBLE), "")
    for name, timing in measured.timings.items():
        failed = isinstance(timing, Exception)
        if failed and name.startswith("torch: "):
            continue  # it does not take these formats
        time_us = None if isinstance(timing, Exception) else timing.best_us if timing.how == "cpu" else timing.median_us
        yield Row(
            op=case.op,
            case=case.label,
            dtype=str(dtype).removeprefix("torch."),
            kernel=name,
            time_us=time_us,
            noise_us=None if isinstance(timing, Exception) else timing.noise_us,
            how="" if isinstance(timing, Exception) else timing.how,
            moved_bytes=moved,
            flops=flops,
            limit_us=limit_us,
            bound=bound,
            share=None if time_us is None else limit_us / time_us,
            chosen=name == chosen,
            note=f"{type(timing).__name__}: {timing}".splitlines()[0] if failed else "" if measured.cold else "warm cache",
        )


def _kind(request: Request, dtype: torch.dtype, limits: Limits) -> str:
    """Format in which the products are done: fp8 where both operands of the product are, on a device that multiplies it."""
    if request.signature is not None and "fp8" in limits.flops_per_s:
        first = [fmt.logical for _, fmt in request.signature][:2]
        if len(first) == 2 and all(name.startswith(_FP8) for name in first):
            return "fp8"
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")

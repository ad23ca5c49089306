"""Holds kernels against the float64 reference, over all cases of their ops and over random ones; the tool behind `verify`."""

from __future__ import annotations

import importlib
import importlib.util
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.dispatch import default_registry
from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.platform import Vendor, platform_of
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, Verdict, evaluate
from tokenspeed_kernel.spec import Band, KernelSpec
from tokenspeed_kernel.testing.compare import ConformanceError, Difference
from tokenspeed_kernel.testing.conformance import check_case, family_cases, public_op
from tokenspeed_kernel.testing.interpreter import device_numbers

__all__ = ["DTYPES", "Failure", "Report", "VerifyOptions", "cases_of", "verify"]

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that cases are run in where the caller names none and the case has none of its own."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What is run, and where.

    Args:
        ops: names of ops; empty for all.
        solutions: only kernels of these solutions; empty for all.
        kernels: only these kernels; empty for all.
        device: to run on.
        dtypes: only these; empty for all that a case takes.
        seeds: each case is run with each of these.
        num_random: random cases of each op that has some, for each seed.
        large: run the sizes meant for timing too; they are too large for an interpreter, where they are left out anyway.
    """

    ops: tuple[str, ...] = ()
    solutions: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: tuple[torch.dtype, ...] = ()
    seeds: tuple[int, ...] = (0,)
    num_random: int = 10
    large: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """One case that a kernel fails, and how."""

    case: str
    dtype: str
    seed: int
    message: str


@dataclass(slots=True)
class Report:
    """What became of one kernel.

    Attributes:
        op, kernel, solution: which.
        how: `native`, `interpreter`, or empty where it was not run.
        unavailable: why it cannot run on this machine; empty where it can.
        passed: number of calls that agree with the reference.
        refused: reasons for which the kernel does not take a case, each with the number of calls.
        failures: those that do not agree, or raise.
        difference: the worst of those that agree.
        time_s: spent, with the reference.
    """

    op: str
    kernel: str
    solution: str
    how: str = ""
    unavailable: str = ""
    passed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    difference: Difference = field(default_factory=Difference)
    time_s: float = 0.0

    @property
    def ran(self) -> bool:
        """Whether the kernel was held against the reference at all."""
        return bool(self.passed or self.failures)


def verify(options: VerifyOptions, registry: Registry | None = None) -> Iterator[Report]:
    """Yield a report for each kernel that is asked for, in order of op and rank; the reference itself has none.

    A kernel that this machine could run but that no case reaches has a failure that says so, unless `dtypes` left cases out; so
    has each kernel of an op without any case.

    Args:
        options: what to run.
        registry: in which the kernels are; the ops' own where left out. It must be the one that the ops use.
    Raises:
        UnknownOpError: an op does not exist.
    """
    registry = default_registry() if registry is None else registry
    for op in options.ops or registry.ops():
        cases = cases_of(registry.contract(op).name)
        for spec in registry.specs(op):
            if spec.band is Band.REFERENCE or not _asked(spec, options):
                continue
            yield _verify_kernel(registry, spec, cases, options)


def cases_of(op: str) -> tuple[Case, ...]:
    """Return the cases of one op; none where its family has no `cases.py`."""
    family = op.partition(".")[0]
    if importlib.util.find_spec(f"tokenspeed_kernel.ops.{family}.cases") is None:
        return ()
    return tuple(case for case in family_cases(family) if case.op == op)


def _asked(spec: KernelSpec, options: VerifyOptions) -> bool:
    solution = not options.solutions or spec.solution in options.solutions
    return solution and (not options.kernels or spec.name in options.kernels)


def _verify_kernel(registry: Registry, spec: KernelSpec, cases: tuple[Case, ...], options: VerifyOptions) -> Report:
    report = Report(spec.op, spec.name, spec.solution)
    platform, config = platform_of(options.device), KernelConfig.from_env()
    here = _reasons(registry, Request(spec.op, platform, solution=spec.name, config=config), spec)
    if here:
        report.unavailable = here
        return report
    interpreted = platform.vendor is Vendor.CPU and spec.capability.mismatch(platform) is not None
    report.how = "interpreter" if interpreted else "native"
    start = time.perf_counter()
    with device_numbers() if interpreted else nullcontext():
        for seed in options.seeds:
            for case in (*cases, *_random_cases(spec.op, seed, options.num_random)):
                if case.bench and (interpreted or not options.large):
                    continue
                for dtype in case.dtypes or DTYPES:
                    if not options.dtypes or dtype in options.dtypes:
                        _run(registry, spec, case, dtype, seed, options.device, config, report)
    report.time_s = time.perf_counter() - start
    if not report.ran and not options.dtypes:
        what = "no case reaches this kernel" if cases else f"{spec.op} has no cases"
        refused = "; ".join(f"{reason} ({count} calls)" for reason, count in list(report.refused.items())[:3])
        report.failures.append(Failure("", "", 0, what + (f": {refused}" if refused else "")))
    return report


def _run(
    registry: Registry,
    spec: KernelSpec,
    case: Case,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    config: KernelConfig,
    report: Report,
) -> None:
    name = str(dtype).removeprefix("torch.")
    try:
        # Whether the kernel takes the case is asked first: what it takes it must get right.
        inputs = case.build(torch.Generator().manual_seed(seed), device, dtype)
        request = request_of(public_op(case.op), inputs)
        why = "" if request is None else _reasons(registry, replace(request, solution=spec.name, config=config), spec)
        if why:
            report.refused[why] = report.refused.get(why, 0) + 1
            return
        difference = check_case(case, solution=spec.name, device=device, dtype=dtype, seed=seed, inputs=inputs)
    except (ShapeError, NoKernelError) as error:
        why = str(error).splitlines()[0]
        report.refused[why] = report.refused.get(why, 0) + 1
    except ConformanceError as error:
        report.failures.append(Failure(case.label, name, seed, str(error)))
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything; it is reported with the case that did it
        report.failures.append(Failure(case.label, name, seed, f"{type(error).__name__}: {error}"))
    else:
        report.passed += 1
        report.difference = report.difference.worst(difference)


def _reasons(registry: Registry, request: Request, spec: KernelSpec) -> str:
    """Why the kernel does not take the request; empty where it does."""
    candidate = next(one for one in evaluate(registry, request) if one.spec is spec)
    return "" if candidate.verdict is Verdict.ELIGIBLE else "; ".join(reason.text for reason in candidate.reasons)


def _random_cases(op: str, seed: int, count: int) -> Iterable[Case]:
    """Cases of random shapes, where the family has a `random_cases.py` with a maker for this op."""
    module = f"tokenspeed_kernel.ops.{op.partition('.')[0]}.random_cases"
    if importlib.util.find_spec(module) is None:
        return
    makers: dict[str, Any] = importlib.import_module(module).RANDOM
    if op in makers:
        # Seeded by op and number, so that a failure can be run again whatever else was run before it.
        for number in range(count):
            yield makers[op](random.Random(f"{op} {seed} {number}"))

"""`tune`: measure the eligible kernels on the device at hand, and keep those that are faster than what rank would choose."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.commands.bench import add_measuring_arguments, bench_options
from tokenspeed_kernel.commands.command import Command, Status, columns

if TYPE_CHECKING:
    from tokenspeed_kernel.bench.measure import BenchOptions, Measured
    from tokenspeed_kernel.bench.timing import Timing
    from tokenspeed_kernel.registry import Registry
    from tokenspeed_kernel.tuning import Choice

__all__ = ["COMMAND", "decide"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measuring_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("tokenspeed_kernel_tuning.json"), metavar="FILE", help="file to write")


def _run(options: argparse.Namespace) -> int:
    from tokenspeed_kernel.dispatch import default_registry
    from tokenspeed_kernel.platform import platform_of
    from tokenspeed_kernel.tuning import Table, machine_pins, write_table

    registry = default_registry()
    asked = bench_options(options, registry)
    calls = _measure(registry, asked)
    choices = [choice for key in sorted(calls, key=repr) if (choice := decide(calls[key])) is not None]
    if not calls:
        print("Nothing was measured: no case meant for timing has two eligible kernels here.", file=sys.stderr)
        print("Fix: name cases with --case, or see `tokenspeed-kernel explain OP`.", file=sys.stderr)
        return Status.FAILED
    platform = platform_of(asked.device)
    pins = machine_pins(platform, _distributions(registry))
    # A quick run's figures mean nothing, and must not decide about anything.
    if not options.quick:
        write_table(options.output, "cpu" if asked.device.type == "cpu" else "gpu", Table(pins, tuple(choices)))
    if options.json:
        facts: dict[str, Any] = {"pins": pins, "calls": len(calls), "choices": [dataclasses.asdict(one) for one in choices]}
        print(json.dumps({**facts, "file": None if options.quick else str(options.output)}, indent=1))
        return Status.OK
    _print(choices, len(calls))
    if options.quick:
        print("Nothing was written: the figures of --quick mean nothing.")
    else:
        print(f"Written to {options.output}. To use it: export TOKENSPEED_KERNEL_TUNING={options.output.resolve()}")
    return Status.OK


def decide(measured: list[Measured]) -> Choice | None:
    """Choose for calls of one key (op, formats, traits), from the timings of all cases that have it.

    A kernel is chosen when it is faster than the first one of the ranked list on the geometric mean of the cases, by more than
    the noise on at least one, and slower by more than the noise on none. So a table only ever departs from rank for a reason.

    Args:
        measured: of each case, with the same kernels in order of rank.
    Returns:
        The choice, or None where rank is right.
    """
    from tokenspeed_kernel.bench.timing import Timing
    from tokenspeed_kernel.tuning import Choice

    request = measured[0].request
    timed = [{name: one for name, one in case.timings.items() if isinstance(one, Timing)} for case in measured]
    ranked = [name for name in measured[0].timings if all(name in case for case in timed)]
    if len(ranked) < 2 or request.signature is None:
        return None
    default = ranked[0]
    means = {name: _geometric_mean([case[name] for case in timed]) for name in ranked}
    for name in sorted(ranked[1:], key=lambda one: means[one]):
        wins = any(case[name].surely_below(case[default]) for case in timed)
        loses = any(case[default].surely_below(case[name]) for case in timed)
        if means[name] < means[default] and wins and not loses:
            traits = tuple(sorted(request.traits.items()))
            return Choice(request.op, str(request.signature), traits, name, default, means[name], means[default])
    return None


def _geometric_mean(timings: list[Timing]) -> float:
    return math.exp(sum(math.log(one.median_us) for one in timings) / len(timings))


def _measure(registry: Registry, options: BenchOptions) -> dict[tuple[Any, ...], list[Measured]]:
    """Timings of every case with two or more eligible kernels, by what selection can tell apart."""
    from tokenspeed_kernel.bench.measure import case_dtypes, measure_case
    from tokenspeed_kernel.testing.verify import cases_of

    calls: dict[tuple[Any, ...], list[Measured]] = {}
    for op in options.ops:
        for case in cases_of(op):
            if case.label not in options.cases if options.cases else not case.bench:
                continue
            for dtype in case_dtypes(case, options):
                measured = measure_case(case, dtype, registry, options)
                if measured is None or len(measured.timings) < 2:
                    continue
                request = measured.request
                key = (op, str(request.signature), tuple(sorted(request.traits.items())))
                calls.setdefault(key, []).append(measured)
                if sys.stderr.isatty():
                    print(f"{op} [{case.label}] ...", file=sys.stderr)
    return calls


def _distributions(registry: Registry) -> set[str]:
    """Distributions whose versions can change a timing: libraries that kernels need, and wheels that brought kernels."""
    libraries = {library.distribution or library.module for spec in registry for library in spec.libraries}
    wheels = {record.distribution.partition(" ")[0] for record in registry.plugins if record.loaded}
    # A module of a plugin's own is pinned by the plugin's version.
    return {name for name in libraries if "." not in name} | wheels


def _print(choices: list[Choice], num_calls: int) -> None:
    rows = [("op", "formats", "traits", "kernel", "us", "instead of", "us")]
    for one in choices:
        traits = ", ".join(f"{name}={value}" for name, value in one.traits)
        figures = (one.kernel, f"{one.time_us:.4g}", one.instead_of, f"{one.instead_of_us:.4g}")
        rows.append((one.op, one.signature, traits, *figures))
    if choices:
        print("\n".join(columns(rows)))
    print(f"{num_calls} kinds of call measured, for {len(choices)} of them another kernel than the first in rank is faster.")


COMMAND = Command("tune", "measure the eligible kernels on this device, and store which is fastest", _add_arguments, _run, order=6)

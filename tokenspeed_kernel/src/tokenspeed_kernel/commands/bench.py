"""`bench`: time on a cold cache, and share of the limits that are measured in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.commands.command import Command, Status, columns
from tokenspeed_kernel.commands.questions import ops_of
from tokenspeed_kernel.commands.verify import device_of, dtypes_of, one_of
from tokenspeed_kernel.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tokenspeed_kernel.bench import BenchOptions, Limits, Row
    from tokenspeed_kernel.registry import Registry

__all__ = ["COMMAND", "add_measuring_arguments", "bench_options"]


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say what is timed; `tune` has them too."""
    parser.add_argument("op", nargs="*", help="only these ops or families")
    parser.add_argument("--solution", action="append", default=[], help="only kernels of this solution; may be repeated")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--case", action="append", default=[], metavar="LABEL", help="only this case, of any size; may be repeated")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; the GPU where there is one")
    parser.add_argument("--dtype", action="append", default=[], help="of the inputs; bf16 on a GPU, fp32 on a CPU; may be repeated")
    parser.add_argument("--threads", type=int, help="threads of PyTorch on a CPU")
    parser.add_argument("--quick", action="store_true", help="few samples and copies, to see that it runs; figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def bench_options(options: argparse.Namespace, registry: Registry) -> BenchOptions:
    """Turn the arguments into options.

    Raises:
        TokenSpeedKernelError: something that is named is not there.
    """
    import torch

    from tokenspeed_kernel.bench import BenchOptions
    from tokenspeed_kernel.testing.verify import cases_of

    ops = ops_of(registry, options.op)
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"bench: --threads: expected 1 or more, got {options.threads}\nFix: leave it out for PyTorch's own.")
        torch.set_num_threads(options.threads)
    return BenchOptions(
        ops=ops,
        solutions=one_of("solution", options.solution, sorted({spec.solution for spec in registry})),
        kernels=one_of("kernel", options.kernel, sorted(spec.name for spec in registry)),
        cases=one_of("case", options.case, [case.label for op in ops for case in cases_of(op)]) if options.case else (),
        dtypes=dtypes_of(options.dtype),
        device=device_of(options.device),
        samples=3 if options.quick else 20,
        copies=2 if options.quick else 64,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measuring_arguments(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the shares of the limit")


def _run(options: argparse.Namespace) -> int:
    if options.plot is not None and options.plot.suffix != ".svg":
        raise ConfigError(f"bench: --plot: expected a name ending in .svg, got {options.plot}\nFix: write {options.plot.stem}.svg.")
    if options.plot is not None and not options.plot.absolute().parent.is_dir():
        raise ConfigError(f"bench: --plot: {options.plot.parent} is not a folder\nFix: make it, or write to another one.")
    from tokenspeed_kernel.bench import bench, measure_limits
    from tokenspeed_kernel.dispatch import default_registry

    registry = default_registry()
    asked = bench_options(options, registry)
    limits = measure_limits(asked.device, quick=options.quick)
    if not options.json:
        print(_limits_text(asked.device, limits))
    rows: list[Row] = []
    for row in bench(asked, limits, registry):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"{row.op} [{row.case}] {row.kernel} ...", file=sys.stderr)
    if options.plot is not None and rows:
        from tokenspeed_kernel.bench.plot import plot_svg

        options.plot.write_text(plot_svg(rows, f"{_device_name(asked.device)}, {time.strftime('%Y-%m-%d')}"), encoding="utf-8")
    if options.json:
        facts = {"machine": _machine(asked.device), "quick": options.quick, "limits": dataclasses.asdict(limits)}
        print(json.dumps({**facts, "rows": [row.to_json() for row in rows]}, indent=1))
    else:
        _print(rows)
    return Status.OK if any(row.time_us is not None for row in rows) else Status.FAILED


def _device_name(device: torch.device) -> str:
    from tokenspeed_kernel.platform import platform_of
    from tokenspeed_kernel.tuning import machine_pins

    return machine_pins(platform_of(device), ())["device"]


def _machine(device: torch.device) -> dict[str, Any]:
    import torch

    from tokenspeed_kernel.platform import platform_of
    from tokenspeed_kernel.tuning import machine_pins

    return {**machine_pins(platform_of(device), ("triton",)), "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d")}


def _limits_text(device: torch.device, limits: Limits) -> str:
    rates = ", ".join(f"{kind} {rate / 1e12:.3g} TFLOP/s" for kind, rate in limits.flops_per_s.items())
    launch = f", {limits.launch_us:.2f} us for a kernel that does nothing" if limits.launch_us else ""
    return f"measured on {_device_name(device)}: reads {limits.bytes_per_s / 1e9:.4g} GB/s, {rates}{launch}"


def _print(rows: list[Row]) -> None:
    if not rows:
        print("Nothing was timed: no case meant for timing has an eligible kernel here.")
        print("Fix: name a case with --case, or see `tokenspeed-kernel explain OP`.")
        return
    table = [("op", "case", "dtype", "kernel", "us", "noise", "GB/s", "GFLOP/s", "limit us", "share", "")]
    for row in rows:
        name = f"{row.kernel} *" if row.chosen else row.kernel
        head = (row.op, row.case, row.dtype, name)
        if row.time_us is None or row.share is None or row.noise_us is None:
            table.append((*head, "-", "-", "-", "-", f"{row.limit_us:.3g}", "-", row.note[:90]))
            continue
        bandwidth, rate = row.moved_bytes / row.time_us / 1e3, (row.flops or 0) / row.time_us / 1e3
        figures = (f"{row.time_us:.4g}", f"{row.noise_us:.2g}", f"{bandwidth:.4g}", f"{rate:.4g}" if row.flops else "-")
        how = ", ".join(part for part in (row.bound, "launches included" if row.how == "events" else "", row.note) if part)
        table.append((*head, *figures, f"{row.limit_us:.3g}", f"{row.share:.0%}", how))
    print("\n".join(columns(table)))
    print("* is what selection takes.")


COMMAND = Command("bench", "time kernels on a cold cache, against limits measured in the same run", _add_arguments, _run, order=5)

"""`verify`: every kernel that this machine can run, against the float64 reference."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from tokenspeed_kernel.commands.command import Command, Status, columns
from tokenspeed_kernel.commands.facts import platform_facts
from tokenspeed_kernel.commands.questions import ops_of
from tokenspeed_kernel.errors import ConfigError, UnknownOpError, close_names

if TYPE_CHECKING:
    import torch

    from tokenspeed_kernel.registry import Registry
    from tokenspeed_kernel.testing.verify import Report

__all__ = ["COMMAND", "device_of", "dtypes_of", "one_of"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="*", help="only these ops or families")
    parser.add_argument("--solution", action="append", default=[], help="only kernels of this solution; may be repeated")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; the GPU where there is one")
    parser.add_argument("--dtype", action="append", default=[], help="only inputs of this dtype, such as bf16; may be repeated")
    parser.add_argument("--seed", type=int, action="append", default=[], help="seed of the values (0); may be repeated")
    parser.add_argument("--random", type=int, default=10, metavar="N", help="random cases for each op and seed (10)")
    parser.add_argument("--interpret", action="store_true", help="run Triton kernels on the CPU, in Triton's interpreter (slow)")
    parser.add_argument("--large", action="store_true", help="also the sizes meant for timing (always, on a GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def device_of(text: str | None) -> torch.device:
    """Return the device of that name, the first GPU where there is no name and the CPU where there is no GPU.

    Raises:
        ConfigError: it is not there.
    """
    import torch

    available = torch.cuda.is_available()
    if text is None:
        return torch.device("cuda" if available else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"device: unknown {text!r}\nFix: write cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu or cuda, got {text!r}\nFix: write cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= (torch.cuda.device_count() if available else 0):
        raise ConfigError(f"device: {text} is not there, PyTorch sees {torch.cuda.device_count()} GPUs\nFix: use cpu.")
    return device


def dtypes_of(texts: list[str]) -> tuple[torch.dtype, ...]:
    """Return the dtypes of these names.

    Raises:
        FormatError: a name is unknown.
    """
    from tokenspeed_kernel.signature import Format

    return tuple(Format.parse(text).storage for text in texts)


def one_of(what: str, names: list[str], known: list[str]) -> tuple[str, ...]:
    """Return the names, each of which must be known.

    Raises:
        UnknownOpError: one is not; the message has close ones.
    """
    for name in names:
        if name not in known:
            raise UnknownOpError(f"{what}: unknown {name!r}\nFix: {close_names(name, known)}")
    return tuple(names)


def _run(options: argparse.Namespace) -> int:
    from tokenspeed_kernel.testing.interpreter import use_interpreter

    if options.interpret:
        use_interpreter()
    if options.random < 0:
        raise ConfigError(f"verify: --random: expected 0 or more, got {options.random}\nFix: write how many cases.")
    from tokenspeed_kernel.dispatch import default_registry
    from tokenspeed_kernel.platform import platform_of
    from tokenspeed_kernel.testing.verify import VerifyOptions, verify

    registry = default_registry()
    device = device_of(options.device)
    asked = VerifyOptions(
        ops=ops_of(registry, options.op),
        solutions=one_of("solution", options.solution, sorted({spec.solution for spec in registry})),
        kernels=one_of("kernel", options.kernel, sorted(spec.name for spec in registry)),
        device=device,
        dtypes=dtypes_of(options.dtype),
        seeds=tuple(options.seed) or (0,),
        num_random=options.random,
        large=options.large or device.type == "cuda",
    )
    reports = []
    for report in verify(asked, registry):
        reports.append(report)
        if not options.json and sys.stderr.isatty():
            print(f"{report.op} {report.kernel} ...", file=sys.stderr)
    status = Status.OK if any(one.ran for one in reports) and not any(one.failures for one in reports) else Status.FAILED
    if options.json:
        facts = {"platform": platform_facts(platform_of(device)), "status": status.name, "kernels": list(map(_facts, reports))}
        print(json.dumps(facts, indent=2))
    else:
        _print(registry, reports)
    return status


def _facts(report: Report) -> dict[str, Any]:
    return {**dataclasses.asdict(report), "ran": report.ran}


def _print(registry: Registry, reports: list[Report]) -> None:
    rows = [("op", "kernel", "how", "passed", "failed", "not taken", "absolute", "relative", "1 - cosine", "time")]
    for one in reports:
        if not one.unavailable:
            worst = one.difference
            figures = (f"{worst.absolute:.2g}", f"{worst.relative:.2g}", f"{1 - worst.cosine:.1g}") if one.passed else ("-",) * 3
            counts = (str(one.passed), str(len(one.failures)), str(sum(one.refused.values())))
            rows.append((one.op, one.kernel, one.how, *counts, *figures, f"{one.time_s:.1f} s"))
    print("\n".join(columns(rows)))
    for one in reports:
        if one.unavailable:
            print(f"not run: {one.kernel}: {one.unavailable}")
    for one in reports:
        for failure in one.failures:
            where = f" [{failure.case}] {failure.dtype} seed {failure.seed}" if failure.case else ""
            print(f"FAILED {one.kernel}{where}: {failure.message}")
    failed = sum(len(one.failures) for one in reports)
    passed, kernels = sum(one.passed for one in reports), sum(one.ran for one in reports)
    if not kernels:
        print("Nothing was verified: no kernel that was asked for can run here on any case.")
        print("Fix: see the reasons above, or `tokenspeed-kernel doctor`.")
    else:
        ops = len({one.op for one in reports if one.ran})
        print(f"{passed} calls of {kernels} kernels of {ops} ops agree with the reference, {failed} do not.")


COMMAND = Command("verify", "hold every kernel against the float64 reference", _add_arguments, _run, order=4)

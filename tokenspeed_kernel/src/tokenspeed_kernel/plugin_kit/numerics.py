"""Runs each kernel that can run here: parameters, numbers against the reference, outputs against the fake implementation."""

from __future__ import annotations

from collections import Counter
from typing import Final

import torch

from tokenspeed_kernel.dispatch import load_kernel
from tokenspeed_kernel.errors import KernelLoadError
from tokenspeed_kernel.plugin_kit.fakes import check_fakes
from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.plugin_kit.source import parameters_in_source
from tokenspeed_kernel.plugin_kit.wheel import Wheel
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.spec import KernelSpec
from tokenspeed_kernel.testing.verify import DTYPES, VerifyOptions, cases_of, verify
from tokenspeed_kernel.testing.verify import Report as Verification

__all__ = ["check_numerics"]

_PLAIN: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHOWN: Final = 3


def check_numerics(registry: Registry, specs: list[KernelSpec], wheel: Wheel, report: Report) -> None:
    """Add what the kernels do on the devices of this machine. That nothing could run is a failure.

    Args:
        registry: in use by the ops, with the plugin's kernels in it.
        specs: those kernels.
        wheel: where they come from.
        report: to add to.
    """
    ran = 0
    for spec in specs:
        obstacles = []
        for device in _devices():
            calls, why = _check_kernel(registry, spec, device, report)
            ran += calls
            obstacles += [why] if why else []
        if len(obstacles) == len(_devices()):
            unseen = parameters_in_source(wheel, spec.implementation) is None
            also = "; its parameters were not seen either" if unseen else ""
            report.note(Area.NUMERICS, f"{spec.name} was not run here: {'; '.join(dict.fromkeys(obstacles))}{also}")
    if not ran:
        report.fail(
            Area.NUMERICS,
            "no case ran: nothing shows that any kernel of this wheel is right",
            "run the check on a machine that the kernels are for",
        )


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    return [*found, torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else found


def _check_kernel(registry: Registry, spec: KernelSpec, device: torch.device, report: Report) -> tuple[int, str]:
    """Run it on every case that it takes; return how many calls agree, and why it could not be run."""
    cases = cases_of(spec.op)
    dtypes = tuple(dict.fromkeys((*DTYPES, *(dtype for case in cases for dtype in case.dtypes))))
    verified = {
        dtype: next(verify(VerifyOptions(ops=(spec.op,), kernels=(spec.name,), device=device, dtypes=(dtype,)), registry))
        for dtype in dtypes
    }
    why = next((one.unavailable for one in verified.values() if one.unavailable), "")
    if why:
        return 0, why
    try:
        load_kernel(spec, registry.contract(spec.op))
    except KernelLoadError as error:
        fix = "give the function the op's parameters, and let its module import"
        report.fail(Area.CONTRACT, str(error).partition("\n")[0], fix)
        return 0, ""
    if not cases:
        report.note(Area.NUMERICS, f"{spec.name}: {spec.op} has no cases, so its numbers were not held against the reference")
        return 0, ""
    failures = [failure for one in verified.values() for failure in one.failures]
    for failure in failures[:_SHOWN]:
        what = f"{spec.name}: {failure.case} {failure.dtype}: {failure.message.partition(chr(10))[0]}"
        report.fail(Area.NUMERICS, what, "correct the kernel, or narrow its formats and traits")
    if len(failures) > _SHOWN:
        report.fail(Area.NUMERICS, f"{spec.name}: {len(failures) - _SHOWN} more calls fail", "see the first ones")
    passed = sum(one.passed for one in verified.values())
    if not passed and not failures:
        refused: Counter[str] = Counter()
        for one in verified.values():
            refused.update(one.refused)
        whys = "; ".join(f"{text} ({count} calls)" for text, count in refused.most_common(2))
        fix = "widen its formats or traits; what no case covers nobody can trust"
        report.fail(Area.NUMERICS, f"{spec.name}: none of the {len(cases)} cases of {spec.op} fits it on {device}: {whys}", fix)
        return 0, ""
    if not failures:
        _add_passed(spec, device, verified, report)
        check_fakes(spec, device, cases, [dtype for dtype, one in verified.items() if one.passed], report)
    ran = {dtype for dtype, one in verified.items() if one.ran}
    first = {str(signature.operands[0][1]) for signature in spec.formats if signature.operands}
    unseen = sorted(name for name in first if name in _PLAIN and _PLAIN[name] not in ran)
    if unseen:
        report.note(Area.CAPABILITY, f"{spec.name}: it claims {', '.join(unseen)}, and no case showed that")
    return passed, ""


def _add_passed(spec: KernelSpec, device: torch.device, verified: dict[torch.dtype, Verification], report: Report) -> None:
    passed = {dtype: one for dtype, one in verified.items() if one.passed}
    dtypes = ", ".join(f"{str(dtype).removeprefix('torch.')} to {one.difference.absolute:.1g}" for dtype, one in passed.items())
    calls = sum(one.passed for one in passed.values())
    report.ok(Area.NUMERICS, f"{spec.name}: {calls} calls on {device} agree with the reference ({dtypes})")

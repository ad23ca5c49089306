"""Holds what each kernel says of itself against pretended platforms, and its claims against each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tokenspeed_kernel.platform import KNOWN_PLATFORMS, Platform, Target, Vendor, parse_platform
from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.plugin_kit.source import parameters_in_source
from tokenspeed_kernel.plugin_kit.wheel import Wheel
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, Verdict, evaluate
from tokenspeed_kernel.spec import KernelSpec

__all__ = ["check_capability"]

_ARCH: Final = re.compile(r"\b(sm_\d{2,3}|gfx[0-9a-f]{3,4})[af]?\b")


def check_capability(registry: Registry, specs: list[KernelSpec], wheel: Wheel, report: Report) -> None:
    """Add, for each kernel, where it could be chosen, and every claim that cannot be true."""
    for spec in specs:
        wrong = list(_contradictions(registry, spec, wheel))
        for text, fix in wrong:
            report.fail(Area.CAPABILITY, f"{spec.name}: {text}", fix)
        if not wrong:
            where = ", ".join(str(one) for one in _platforms(spec) if _runs_on(registry, spec, one))
            verified = ", ".join(str(one) for one in spec.verified) or "not verified yet"
            report.ok(Area.CAPABILITY, f"{spec.name}: {', '.join(spec.capability.targets)} covers {where}; {verified}")


def _platforms(spec: KernelSpec) -> list[Platform]:
    """Every known platform; the host processor with the features that the kernel asks for."""
    known = [parse_platform(name) for name in KNOWN_PLATFORMS]
    return [Platform(one.vendor, one.arch, spec.capability.features) if one.vendor is Vendor.CPU else one for one in known]


def _runs_on(registry: Registry, spec: KernelSpec, platform: Platform) -> bool:
    """Whether selection on that platform takes it when it is asked for, libraries apart."""
    found = next(one for one in evaluate(registry, Request(spec.op, platform, solution=spec.name)) if one.spec is spec)
    return found.verdict is Verdict.ELIGIBLE or all(reason.library for reason in found.reasons)


def _contradictions(registry: Registry, spec: KernelSpec, wheel: Wheel) -> Iterator[tuple[str, str]]:
    """(what cannot be true, remedy) pairs."""
    capability = spec.capability
    covered = [one for one in _platforms(spec) if _runs_on(registry, spec, one)]
    if not covered:
        yield f"built for {', '.join(capability.targets)}: no known platform is covered", "name what it was built for"
    libraries = ", ".join(library.module for library in spec.libraries if library.module.partition(".")[0] not in wheel.top_level())
    if "any" in capability.targets and libraries:
        yield (
            f'claims "any" platform, and needs {libraries}',
            "name the platforms that it was built for or on which the library runs",
        )
    if spec.graph_safe and not any(one.vendor is not Vendor.CPU for one in covered):
        yield "claims to be safe in a GPU graph, and runs on no GPU", "leave graph_safe out"
    if capability.interpreter and not any(library.module == "triton" for library in spec.libraries):
        yield "claims to run in Triton's interpreter, and does not require triton", "leave interpreter out"
    for verified in spec.verified:
        for arch in _ARCH.findall(str(verified)):
            if arch in KNOWN_PLATFORMS and not any(Target(text).covers(parse_platform(arch)) for text in capability.targets):
                yield (
                    f"says that it was verified on {arch}, and is built for {', '.join(capability.targets)}",
                    "correct the targets or the claim",
                )
    parameters = parameters_in_source(wheel, spec.implementation)
    wanted = registry.contract(spec.op).parameters
    if parameters is not None and parameters != wanted:
        yield (
            f"{spec.implementation} takes ({', '.join(parameters)}), expected ({', '.join(wanted)})",
            f"give it the parameters of {spec.op}",
        )
    for trait, constraint in spec.traits.items():
        values = constraint.candidates()
        if values is not None and not values:
            yield f"its constraint on {trait} admits no value", "leave it out, or name the values"

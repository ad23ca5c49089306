"""Chooses a kernel for a call, and explains the choice, in one function.

`evaluate` yields every kernel of the op with a verdict and the exact reasons, best first. `select` takes the first
eligible one; `explain` in the command line prints them all. So an explanation cannot differ from what is chosen.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import torch
from packaging.specifiers import SpecifierSet

from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import ConfigError, FormatError, NoKernelError, PluginError, PluginWarning, close_names
from tokenspeed_kernel.platform import Platform, Vendor, current_platform, platform_of
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, KernelSpec, Library, OpContract
from tokenspeed_kernel.ties import effective_constraint
from tokenspeed_kernel.traits import ANY, AnyValue, TraitValue
from tokenspeed_kernel.tuning import choice_for

__all__ = [
    "PROBE",
    "Candidate",
    "Probed",
    "Reason",
    "Request",
    "Verdict",
    "check_solution",
    "evaluate",
    "library_problem",
    "select",
    "suggest_fix",
]

PROBE: Final = "?"
"""As `solution`: nothing is chosen and nothing runs; `select` raises `Probed` with what the call asks for. Tools use it to learn
which formats and traits an op makes of given arguments."""


class Verdict(StrEnum):
    """What became of a kernel for one request."""

    ELIGIBLE = "eligible"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a kernel was rejected, and what would change that (empty when the caller cannot).

    `library`: a library that the kernel needs is missing, broken or of another version.
    """

    text: str
    remedy: str = ""
    library: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel's outcome.

    `conditions` are limits on traits that the request left open. `tuned` says that a measurement put it before its rank.
    """

    spec: KernelSpec
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    conditions: tuple[str, ...] = ()
    tuned: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a kernel is wanted for.

    Args:
        op: `family.op`.
        platform: real or pretended.
        signature: formats of the operands that the call has; None leaves them open (for an explanation).
        traits: values; a trait that is left out stays open (for an explanation).
        solution: solution or kernel name that the caller insists on.
        config: settings.
    """

    op: str
    platform: Platform
    signature: Signature | None = None
    traits: Mapping[str, TraitValue] = field(default_factory=dict)
    solution: str | None = None
    config: KernelConfig = field(default_factory=KernelConfig)

    def __str__(self) -> str:
        parts = [str(self.signature)] if self.signature is not None and self.signature.operands else []
        parts += [f"{name}={value}" for name, value in self.traits.items()]
        parts += [f'solution="{self.solution}"'] if self.solution is not None else []
        return f"{self.op} on {self.platform}" + (f", {', '.join(parts)}" if parts else "")


class Probed(BaseException):
    """A call with `solution=PROBE` came to its selection. Not an error, so that no handler of errors takes it for one.

    Attributes:
        request: what it asks for, without a solution.
    """

    def __init__(self, request: Request) -> None:
        """Keep the request."""
        super().__init__(str(request))
        self.request = request


def evaluate(registry: Registry, request: Request) -> Iterator[Candidate]:
    """Yield every kernel of the op with its verdict: one that was measured to be the fastest first, then in order of rank.

    Raises:
        UnknownOpError: the op does not exist.
        ConfigError: the op has no trait of a name in the request.
        FormatError: the op has no operand of a name in the request.
        TuningError: there is a tuning file, and it is of another machine or version.
    """
    contract = registry.contract(request.op)
    _check_names(contract, request)
    specs = registry.specs(request.op)
    first = _tuned(specs, request)
    if first is not None:
        spec, note = first
        candidate = _candidate(registry, contract, spec, request)
        if candidate.verdict is Verdict.ELIGIBLE:
            yield replace(candidate, tuned=note)
            specs = tuple(one for one in specs if one is not spec)
    for spec in specs:
        yield _candidate(registry, contract, spec, request)


def _check_names(contract: OpContract, request: Request) -> None:
    """A name that the op does not have would not restrict anything, and is refused instead."""
    traits = [trait.name for trait in contract.traits]
    for name in request.traits:
        if name not in traits:
            raise ConfigError(f"{contract.name}: unknown trait {name!r}\nFix: {close_names(name, traits)}")
    for name, _ in request.signature or ():
        if name not in contract.operands:
            raise FormatError(f"{contract.name}: unknown operand {name!r}\nFix: {close_names(name, contract.operands)}")


def _tuned(specs: Iterable[KernelSpec], request: Request) -> tuple[KernelSpec, str] | None:
    """The kernel that a tuning file names for the request, and why. Who insists on a solution gets that one."""
    path, signature = request.config.tuning, request.signature
    if not path or signature is None or request.solution is not None or not _is_here(request.platform):
        return None
    choice = choice_for(path, request.op, str(signature), request.traits, request.platform)
    if choice is None:
        return None
    # A plugin that is gone takes its kernels along; its version is among the table's pins, so that this is an edited file.
    return next(((spec, choice.note) for spec in specs if spec.name == choice.kernel), None)


def _is_here(platform: Platform) -> bool:
    """Whether it is one of this machine's platforms, and not a pretended one."""
    return platform == (platform_of(torch.device("cpu")) if platform.vendor is Vendor.CPU else current_platform())


def _candidate(registry: Registry, contract: OpContract, spec: KernelSpec, request: Request) -> Candidate:
    reasons = list(_reasons(contract, spec, request))
    tied = registry.tied(spec.name)
    if tied is not None:
        reasons.append(Reason(f"disabled: {tied}", "say which plugin wins with TOKENSPEED_KERNEL_PREFER"))
    if not reasons:
        # Importing a library can be slow; it is tried only for a kernel that nothing else rules out.
        reasons = [reason for library in spec.libraries if (reason := library_problem(library)) is not None]
    verdict = Verdict.REJECTED if reasons else Verdict.ELIGIBLE
    return Candidate(spec, verdict, tuple(reasons), tuple(_conditions(contract, spec, request)))


def select(registry: Registry, request: Request) -> KernelSpec:
    """Return the best eligible kernel.

    Raises:
        UnknownOpError: the op does not exist.
        PluginError: `solution` names a plugin, or something of one, that failed to load or is disabled.
        NoKernelError: no kernel is eligible; the message has each one's reason.
        Probed: `solution` is `PROBE`.
    """
    if request.solution == PROBE:
        raise Probed(replace(request, solution=None))
    if request.solution is not None:
        check_solution(registry, request)
    candidates: list[Candidate] = []
    for candidate in evaluate(registry, request):
        if candidate.verdict is Verdict.ELIGIBLE:
            _report_broken_plugins(registry, request, candidates, candidate.spec)
            return candidate.spec
        candidates.append(candidate)
    wanted = request.solution
    shown = [one for one in candidates if wanted is None or one.spec.answers_to(wanted)] or candidates
    rejections = [(one.spec.name, "; ".join(reason.text for reason in one.reasons)) for one in shown]
    rejections += [(f"plugin {one.name}", one.error) for one in registry.plugins if one.error]
    raise NoKernelError(str(request), rejections, suggest_fix(registry, request, shown))


def _report_broken_plugins(registry: Registry, request: Request, rejected: Iterable[Candidate], chosen: KernelSpec) -> None:
    """Whoever installed a plugin is told when nothing but a library keeps its better kernel from being used."""
    for candidate in rejected:
        record = registry.plugin_of(candidate.spec.name)
        if record is not None and candidate.reasons and all(reason.library for reason in candidate.reasons):
            why = "; ".join(reason.text for reason in candidate.reasons)
            remedies = " and ".join(reason.remedy for reason in candidate.reasons if reason.remedy) or "repair the library"
            warnings.warn(
                f"plugin {record.label}: {candidate.spec.name} is not used for {request.op}, {chosen.name} is: {why}\n"
                f"Fix: {remedies}, or set TOKENSPEED_KERNEL_DISABLE={candidate.spec.name}.",
                PluginWarning,
                stacklevel=2,
            )


def suggest_fix(registry: Registry, request: Request, candidates: Iterable[Candidate]) -> str:
    """Say what would admit a kernel: the shortest remedy, and the reference.

    Args:
        registry: that was asked.
        request: what was asked for.
        candidates: the rejected kernels that the remedy is to be for.
    Returns:
        A phrase without a full stop.
    """
    fixable = [one for one in candidates if all(reason.remedy for reason in one.reasons)]
    fixable = [one for one in fixable if one.spec.band is not Band.REFERENCE]
    remedies = []
    if fixable:
        best = min(fixable, key=lambda one: len(one.reasons))
        remedies.append(" and ".join(reason.remedy for reason in best.reasons))
    if request.solution is None and any(spec.band is Band.REFERENCE for spec in registry.specs(request.op)):
        remedies.append('pass solution="reference"')
    if not remedies and request.solution is not None:
        remedies.append("leave solution out to let another kernel be chosen")
    return ", or ".join(remedies) or "install a plugin that has a kernel for it, or move the tensors to another device"


def _reasons(contract: OpContract, spec: KernelSpec, request: Request) -> Iterator[Reason]:
    wanted, platform = request.solution, request.platform
    asked = wanted is not None and spec.answers_to(wanted)
    if wanted is not None and not asked:
        yield Reason(f'not asked for (solution="{wanted}")')
    if spec.band is Band.REFERENCE and not asked:
        yield Reason("never chosen unless asked for", f'pass solution="{spec.solution}"')
    disabled = sorted({spec.name, spec.solution} & request.config.disabled)
    if disabled:
        text = f"disabled by TOKENSPEED_KERNEL_DISABLE ({', '.join(disabled)})"
        yield Reason(text, f"take {disabled[0]} out of TOKENSPEED_KERNEL_DISABLE")
    mismatch = spec.capability.mismatch(platform)
    if mismatch is not None:
        if spec.capability.interpreter and platform.vendor is Vendor.CPU:
            if not request.config.triton_interpreter:
                yield Reason(f"{mismatch}; the interpreter needs TRITON_INTERPRET=1", "")
            elif not asked:
                yield Reason(f"{mismatch}; the interpreter is never chosen unless asked for", "")
        else:
            yield Reason(mismatch)
    yield from _format_reasons(spec, request.signature)
    for trait in contract.traits:
        constraint = effective_constraint(contract, spec, trait.name)
        if constraint is None or trait.name not in request.traits:
            continue
        value = request.traits[trait.name]
        if not constraint.accepts(value):
            nearest = constraint.nearest(value)
            remedy = f"set {trait.name} to {nearest}" if nearest is not None else ""
            yield Reason(f"{constraint.describe(trait.name)}, got {value}", remedy)


def _format_reasons(spec: KernelSpec, got: Signature | None) -> Iterator[Reason]:
    if got is None or not spec.formats or any(signature.accepts(got) for signature in spec.formats):
        return
    # Name the operand that no signature takes; where each alone would do, the combination is what is wrong.
    for operand, value in got:
        takes = {one for signature in spec.formats if (one := signature.get(operand)) is not None}
        if value not in takes:
            listed = ", ".join(sorted(str(one) for one in takes)) or "none (the operand must be absent)"
            yield Reason(f"{operand} in {{{listed}}}, got {value}" if takes else f"{operand} {listed}, got {value}")
            return
    combinations = " | ".join(str(signature) for signature in spec.formats)
    yield Reason(f"formats in {{{combinations}}}, got {got}")


def library_problem(library: Library) -> Reason | None:
    """Say why a library cannot be used, with the import's own words, or None where it can. The import is tried."""
    try:
        importlib.import_module(library.module)
    except Exception as error:  # noqa: BLE001 - a vendor's package may raise anything when it finds no driver
        text = f"library {library.module} does not import: {type(error).__name__}: {error}"
        return Reason(text, f"pip install '{library.requirement}'" if isinstance(error, ModuleNotFoundError) else "", library=True)
    if not library.version:
        return None
    try:
        found = importlib.metadata.version(library.distribution or library.module)
    except importlib.metadata.PackageNotFoundError:
        return Reason(f"library {library.module} has no installed metadata, so that its version is unknown", library=True)
    if SpecifierSet(library.version).contains(found, prereleases=True):
        return None
    return Reason(f"needs {library.requirement}, got {found}", f"pip install '{library.requirement}'", library=True)


def _conditions(contract: OpContract, spec: KernelSpec, request: Request) -> Iterator[str]:
    for trait in contract.traits:
        constraint = effective_constraint(contract, spec, trait.name)
        if constraint is not None and trait.name not in request.traits:
            default = trait.default
            if default is ANY or isinstance(default, AnyValue) or not constraint.accepts(default):
                yield constraint.describe(trait.name)


def check_solution(registry: Registry, request: Request) -> None:
    """Refuse a solution that a failed plugin owns, or that nobody has; it is never replaced by another."""
    wanted = request.solution
    assert wanted is not None
    specs = registry.specs(request.op)
    for record in registry.plugins:
        # A plugin that was refused because it took a name of someone else's does not own that name.
        theirs = registry.owner(wanted) not in (None, record.distribution) or any(spec.answers_to(wanted) for spec in specs)
        if not record.loaded and record.answers_to(wanted) and not theirs:
            why = "is disabled by TOKENSPEED_KERNEL_DISABLE_PLUGINS" if record.disabled else f"failed: {record.error}"
            raise PluginError(
                f'{request.op}: solution="{wanted}" belongs to plugin {record.name} ({record.distribution}), '
                f"which {why}\nFix: repair or enable the plugin, or ask for another solution."
            ) from record.cause
    if any(spec.answers_to(wanted) for spec in specs):
        return
    failed = [record for record in registry.plugins if record.error]
    known = ", ".join(sorted({spec.solution for spec in specs} | {spec.name for spec in specs}))
    rejections = [(f"plugin {record.name}", f"failed: {record.error}") for record in failed]
    error = NoKernelError(
        f'{request.op}: no kernel or solution is named "{wanted}"', rejections, f"use one of {known or 'none'}"
    )
    raise error from (failed[0].cause if failed else None)

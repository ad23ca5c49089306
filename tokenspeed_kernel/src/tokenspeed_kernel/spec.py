"""What an op promises (`OpContract`) and what a kernel says of itself (`KernelSpec`). Both are data alone.

A spec names its implementation by module and attribute, so listing every kernel imports none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tokenspeed_kernel.errors import PlatformError, RegistrationError
from tokenspeed_kernel.platform import Platform, Target, Vendor
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.traits import Constraint, Trait

__all__ = [
    "ANYWHERE",
    "CPU",
    "TRITON_PORTABLE",
    "Band",
    "Capability",
    "KernelSpec",
    "Library",
    "OpContract",
    "Verified",
    "VerifiedBy",
]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OP_NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")
_IMPLEMENTATION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Band(IntEnum):
    """Rank of a kernel; a higher band is chosen first. Within a band `KernelSpec.priority` decides."""

    REFERENCE = 0
    """The truth, for comparison. Never chosen unless asked for."""
    PORTABLE = 10
    """Runs on many devices."""
    PERFORMANT = 20
    """Made for speed on a class of devices, or a well-kept library."""
    SPECIALIZED = 30
    """Made for one device and a narrow set of shapes."""
    PLUGIN = 40
    """From a plugin of an outsider; whoever installed it wants it used."""


class VerifiedBy(StrEnum):
    """How a kernel was checked. Only `silicon` means that it ran on the hardware that it is for."""

    SILICON = "silicon"
    INTERPRETER = "interpreter"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Verified:
    """One check that a kernel went through.

    Args:
        by: how.
        on: device, or target of the compilation: `H200`, `x86-64 AVX2`, `sm_100a`.
        note: what was checked where that is not the whole conformance suite.
    """

    by: VerifiedBy
    on: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.by} ({self.on}{': ' + self.note if self.note else ''})"


@dataclass(frozen=True, slots=True)
class Capability:
    """Where a kernel runs.

    Args:
        targets: what it was built for, in the text forms of `platform.Target`; one must cover the device.
        features: abilities that the device must have (`avx2`).
        interpreter: Triton's interpreter can run it on the CPU, for tests: only when asked for by name and with
            TRITON_INTERPRET=1.
    """

    targets: tuple[str, ...]
    features: frozenset[str] = field(default_factory=frozenset)
    interpreter: bool = False

    def mismatch(self, platform: Platform) -> str | None:
        """Return why the kernel does not run on `platform`, or None where it does."""
        if not any(Target(text).covers(platform) for text in self.targets):
            return f"built for {', '.join(self.targets)}, got {platform}"
        missing = sorted(self.features - platform.features)
        return f"needs {', '.join(missing)}, which {platform} lacks" if missing else None

    def overlaps(self, other: Capability, platforms: tuple[Platform, ...]) -> bool:
        """Say whether some device runs both; features are taken to be present together."""
        everything = self.features | other.features
        devices = [
            Platform(one.vendor, one.arch, everything) if one.vendor is Vendor.CPU else one for one in platforms
        ]
        return any(self.mismatch(one) is None and other.mismatch(one) is None for one in devices)


ANYWHERE = Capability(("any",))
"""Runs on every platform: plain PyTorch."""
CPU = Capability(("cpu",))
"""Runs on the host processor, whatever its features."""
TRITON_PORTABLE = Capability(("nvidia>=sm_80", "amd>=gfx90a"), interpreter=True)
"""Triton without anything of one architecture; it also runs in Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Library:
    """A Python package that a kernel needs.

    Args:
        module: name to import.
        distribution: name to install and whose version counts; the module's name where left out.
        version: version specifier, such as `>=3.6`; empty for any.
    """

    module: str
    distribution: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        try:
            SpecifierSet(self.version)
        except InvalidSpecifier as error:
            raise RegistrationError(f"library {self.module}: bad version specifier {self.version!r}") from error

    @property
    def requirement(self) -> str:
        """What to give to pip."""
        return f"{self.distribution or self.module}{self.version}"


@dataclass(frozen=True, slots=True)
class OpContract:
    """What an op is: the operands whose formats count, the traits of a call, the parameters of an implementation.

    Args:
        name: `family.op`.
        operands: operands whose formats decide about a kernel, in the order in which the api passes their dtypes.
        parameters: parameter names of every implementation, in order; the public op's without `solution`.
        traits: in the order in which the api passes their values.
        summary: one line for the listing.
        by_position: the op passes every argument by position, which is quicker where there are many. An implementation may
            still take some by keyword only, at the cost of one more call.
    """

    name: str
    operands: tuple[str, ...]
    parameters: tuple[str, ...]
    traits: tuple[Trait, ...] = ()
    summary: str = ""
    by_position: bool = False

    def __post_init__(self) -> None:
        if not _OP_NAME.fullmatch(self.name):
            raise RegistrationError(f"contract: op name {self.name!r} is not of the form family.op")

    def trait(self, name: str) -> Trait | None:
        """Return the trait of that name, or None."""
        return next((trait for trait in self.traits if trait.name == name), None)


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """What a kernel is and where it may be used.

    Args:
        op: `family.op`, the contract's name.
        name: unique over all kernels: solution, op and, where it is for one, the arch (`gluon_mla_decode_sm90`).
        solution: group that a user can ask for: `reference`, `cpu`, `triton`, ...
        band: rank.
        implementation: `module:function`; the function takes the contract's parameters. Imported when first bound.
        capability: where it runs.
        formats: signatures that it takes; empty for all.
        traits: constraint for each trait that it restricts, or for which it takes more than the default.
        requires: libraries that must import.
        priority: rank within the band. Two kernels that some call fits must differ in band or priority.
        graph_safe: a CUDA graph can capture it: after a first call it allocates and compiles nothing.
        verified: how it was checked.
    """

    op: str
    name: str
    solution: str
    band: Band
    implementation: str
    capability: Capability
    formats: tuple[Signature, ...] = ()
    traits: Mapping[str, Constraint] = field(default_factory=dict)
    requires: tuple[Library | str, ...] = ()
    priority: int = 0
    graph_safe: bool = False
    verified: tuple[Verified, ...] = ()

    def __post_init__(self) -> None:
        for label, value, pattern in (
            ("op", self.op, _OP_NAME),
            ("name", self.name, _NAME),
            ("solution", self.solution, _NAME),
            ("implementation", self.implementation, _IMPLEMENTATION),
        ):
            if not pattern.fullmatch(value):
                raise RegistrationError(f"kernel {self.name!r}: bad {label} {value!r}, expected {pattern.pattern}")
        for target in self.capability.targets:
            try:
                Target(target)
            except PlatformError as error:
                raise RegistrationError(f"kernel {self.name!r}: {error}") from error
        object.__setattr__(self, "traits", MappingProxyType(dict(self.traits)))

    @property
    def libraries(self) -> tuple[Library, ...]:
        """`requires`, with each plain name as a `Library`."""
        return tuple(Library(one) if isinstance(one, str) else one for one in self.requires)

    def answers_to(self, solution: str) -> bool:
        """Say whether `solution` is this kernel's solution or name."""
        return solution in (self.solution, self.name)

"""Collects contracts and specs, checks them, and freezes.

A family is a folder under `ops/` with a `contract.py`; it is found by its folder, so that adding one edits no list. Its
`contract.py` holds `CONTRACTS`, its `specs.py` and each solution folder's `specs.py` hold `SPECS`. None of these import
a kernel.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed_kernel.errors import RegistrationError, UnknownOpError
from tokenspeed_kernel.platform import KNOWN_PLATFORMS, parse_platform
from tokenspeed_kernel.spec import Band, KernelSpec, OpContract
from tokenspeed_kernel.traits import ANY, AnyValue, Constraint, OneOf

__all__ = ["BUILTIN", "PluginRecord", "Registry", "collect_builtin"]

BUILTIN = "tokenspeed_kernel"
"""Origin of the kernels in this distribution."""

_PLATFORMS = tuple(parse_platform(name) for name in KNOWN_PLATFORMS)


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin.

    Args:
        name: name of the entry point.
        distribution: name and version of the wheel.
        error: why it was left out, with the exception's type and text; empty when it was loaded.
        provides: solutions and kernel names that it has, as far as they are known.
        disabled: it was left out by configuration.
    """

    name: str
    distribution: str
    error: str = ""
    provides: frozenset[str] = field(default_factory=frozenset)
    disabled: bool = False
    cause: BaseException | None = None

    @property
    def loaded(self) -> bool:
        """Whether its kernels take part in selection."""
        return not self.error and not self.disabled

    def answers_to(self, solution: str) -> bool:
        """Say whether `solution` names the plugin or something that it provides."""
        return solution == self.name or solution in self.provides


class Registry:
    """Contracts and specs of all ops. `add` checks each group as a whole; nothing of a bad group stays."""

    def __init__(self) -> None:
        self._contracts: dict[str, OpContract] = {}
        self._by_op: dict[str, list[KernelSpec]] = {}
        self._by_name: dict[str, KernelSpec] = {}
        self._origin: dict[str, str] = {}
        self._plugins: list[PluginRecord] = []
        self._frozen = False

    def add_contracts(self, contracts: Iterable[OpContract]) -> None:
        """Add ops.

        Raises:
            RegistrationError: an op of that name exists, or the registry is frozen.
        """
        self._check_open()
        for contract in contracts:
            if contract.name in self._contracts:
                raise RegistrationError(f"registry: op {contract.name} is defined twice")
            self._contracts[contract.name] = contract
            self._by_op[contract.name] = []

    def add(self, specs: Iterable[KernelSpec], origin: str = BUILTIN) -> None:
        """Add a group of kernels: all of them or, when one is bad, none.

        Args:
            specs: the kernels.
            origin: distribution that they come from, for the listing.
        Raises:
            RegistrationError: a spec contradicts its op's contract, its name is taken, it ties with another kernel of
                the same band and priority, or the registry is frozen.
        """
        self._check_open()
        group = list(specs)
        names: dict[str, KernelSpec] = {}
        for spec in group:
            self._check_spec(spec, origin)
            other = names.get(spec.name) or self._by_name.get(spec.name)
            if other is not None:
                raise RegistrationError(
                    f"registry: kernel name {spec.name!r} is used twice: {other.implementation} "
                    f"({self._origin.get(other.name, origin)}) and {spec.implementation} ({origin})\n"
                    "Fix: rename one; a name is unique over all packages."
                )
            names[spec.name] = spec
        touched = {spec.op for spec in group}
        for op in sorted(touched):
            new = [spec for spec in group if spec.op == op]
            self._check_ties(self._contracts[op], [*self._by_op[op], *new])
        for spec in group:
            self._by_op[spec.op].append(spec)
            self._by_name[spec.name] = spec
            self._origin[spec.name] = origin

    def add_plugin(self, record: PluginRecord) -> None:
        """Remember what became of a plugin."""
        self._check_open()
        self._plugins.append(record)

    def freeze(self) -> Registry:
        """Check the whole once more, sort by rank, and refuse changes from now on."""
        for op, specs in self._by_op.items():
            self._check_ties(self._contracts[op], specs)
            specs.sort(key=lambda spec: (-spec.band, -spec.priority, spec.name))
        self._frozen = True
        return self

    def ops(self) -> tuple[str, ...]:
        """Names of all ops, sorted."""
        return tuple(sorted(self._contracts))

    def contract(self, op: str) -> OpContract:
        """Return the op's contract.

        Raises:
            UnknownOpError: there is no such op; the message suggests close names.
        """
        contract = self._contracts.get(op)
        if contract is None:
            short = {name.split(".")[1]: name for name in self.ops()}
            close = difflib.get_close_matches(op, self.ops(), n=3, cutoff=0.6)
            close += [short[name] for name in difflib.get_close_matches(op.split(".")[-1], short, n=3, cutoff=0.6)]
            hint = f"did you mean {' or '.join(dict.fromkeys(close))}?" if close else f"known: {', '.join(self.ops())}."
            raise UnknownOpError(f"registry: unknown op {op!r}\nFix: {hint}")
        return contract

    def specs(self, op: str) -> tuple[KernelSpec, ...]:
        """Kernels of the op in order of rank, the highest first."""
        self.contract(op)
        return tuple(self._by_op[op])

    def __iter__(self) -> Iterator[KernelSpec]:
        return itertools.chain.from_iterable(self._by_op[op] for op in self.ops())

    def origin(self, kernel: str) -> str:
        """Distribution that the kernel of that name comes from."""
        return self._origin[kernel]

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """What became of each installed plugin."""
        return tuple(self._plugins)

    def _check_open(self) -> None:
        if self._frozen:
            raise RegistrationError("registry: it is frozen\nFix: register from a plugin, which is loaded before the first call.")

    def _check_spec(self, spec: KernelSpec, origin: str) -> None:
        contract = self._contracts.get(spec.op)
        if contract is None:
            known = difflib.get_close_matches(spec.op, self.ops(), n=3, cutoff=0.5) or self.ops()
            raise RegistrationError(f"kernel {spec.name!r}: unknown op {spec.op!r}\nFix: known: {', '.join(known)}.")
        if origin == BUILTIN and spec.band is Band.PLUGIN:
            raise RegistrationError(f"kernel {spec.name!r}: the PLUGIN band is for plugins")
        if origin != BUILTIN and spec.band is Band.REFERENCE:
            raise RegistrationError(f"kernel {spec.name!r}: a plugin cannot register a reference")
        for trait in spec.traits:
            if contract.trait(trait) is None:
                has = ", ".join(one.name for one in contract.traits) or "none"
                raise RegistrationError(f"kernel {spec.name!r}: {spec.op} has no trait {trait!r}, it has: {has}")
        for signature in spec.formats:
            for operand, _ in signature:
                if operand not in contract.operands:
                    has = ", ".join(contract.operands)
                    raise RegistrationError(f"kernel {spec.name!r}: {spec.op} has no operand {operand!r}, it has: {has}")

    @staticmethod
    def _check_ties(contract: OpContract, specs: list[KernelSpec]) -> None:
        for first, second in itertools.combinations(specs, 2):
            if (first.band, first.priority) == (second.band, second.priority) and _overlap(contract, first, second):
                raise RegistrationError(
                    f"registry: {first.name} and {second.name} tie: both serve {contract.name} in band "
                    f"{first.band.name} with priority {first.priority}, and some calls fit both\n"
                    "Fix: give one a higher priority, or narrow its capability, formats or traits."
                )


def effective_constraint(contract: OpContract, spec: KernelSpec, trait: str) -> Constraint | None:
    """What the kernel takes for the trait: its own constraint, the trait's default alone, or (None) everything."""
    constraint = spec.traits.get(trait)
    declared = contract.trait(trait)
    if constraint is not None or declared is None or declared.default is ANY or isinstance(declared.default, AnyValue):
        return constraint
    return None if spec.band is Band.REFERENCE else OneOf(declared.default)


def _overlap(contract: OpContract, first: KernelSpec, second: KernelSpec) -> bool:
    if not first.capability.overlaps(second.capability, _PLATFORMS):
        return False
    if first.formats and second.formats:
        pairs = itertools.product(first.formats, second.formats)
        if not any(one.overlaps(other) for one, other in pairs):
            return False
    for trait in contract.traits:
        mine = effective_constraint(contract, first, trait.name)
        theirs = effective_constraint(contract, second, trait.name)
        if mine is not None and theirs is not None and not mine.overlaps(theirs):
            return False
    return True


def collect_builtin() -> Registry:
    """Return a registry, still open, of all kernels in this distribution."""
    registry = Registry()
    root = Path(__file__).parent / "ops"
    for family in _children(root):
        if "contract" not in _children(root / family, packages=False):
            continue
        name = f"tokenspeed_kernel.ops.{family}"
        registry.add_contracts(importlib.import_module(f"{name}.contract").CONTRACTS)
        solutions = [
            folder
            for folder in _children(root / family)
            if "specs" in _children(root / family / folder, packages=False)
        ]
        for module_name in ("specs", *(f"{solution}.specs" for solution in solutions)):
            registry.add(importlib.import_module(f"{name}.{module_name}").SPECS)
    return registry


def _children(folder: Path, *, packages: bool = True) -> list[str]:
    """Names of the sub-packages, or of the modules, in a folder; nothing is imported."""
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if module.ispkg is packages)

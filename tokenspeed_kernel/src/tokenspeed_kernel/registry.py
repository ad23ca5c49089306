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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenspeed_kernel.config import PREFER
from tokenspeed_kernel.errors import RegistrationError, UnknownOpError
from tokenspeed_kernel.spec import Band, KernelSpec, OpContract
from tokenspeed_kernel.ties import find_ties, refuse_ties, undecided

__all__ = ["BUILTIN", "PluginRecord", "Registry", "collect_builtin"]

BUILTIN = "tokenspeed_kernel"
"""Origin of the kernels in this distribution."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin.

    Args:
        name: name of the entry point.
        distribution: name and version of the wheel.
        error: why it was left out, with the exception's type and text; empty when it was loaded.
        provides: solutions and kernel names that it has, as far as they are known.
        disabled: it was left out by configuration.
        cause: the exception.
        notes: what its user should know though it was loaded: an op for which it is not used, a library that is missing.
    """

    name: str
    distribution: str
    error: str = ""
    provides: frozenset[str] = field(default_factory=frozenset)
    disabled: bool = False
    cause: BaseException | None = None
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name and distribution, for messages."""
        return f"{self.name} ({self.distribution})"

    @property
    def status(self) -> str:
        """What became of it, for listings."""
        if self.error:
            return f"failed: {self.error}"
        return "disabled" if self.disabled else "; ".join(("loaded", *self.notes))

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
        self._plugin_of: dict[str, str] = {}
        self._owner: dict[str, str] = {}
        self._plugins: list[PluginRecord] = []
        self._tied: dict[str, str] = {}
        self._tie_messages: list[str] = []
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

    def add(self, specs: Iterable[KernelSpec], origin: str = BUILTIN, plugin: str = "") -> None:
        """Add a group of kernels: all of them or, when one is bad, none.

        Args:
            specs: the kernels.
            origin: distribution that they come from, for the listing.
            plugin: name of the plugin that they are of; empty for those of this package.
        Raises:
            RegistrationError: a spec contradicts its op's contract, a name is taken, it ties with another kernel of the
                group or of this package, or the registry is frozen. Ties between two plugins are settled by `freeze`.
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
        owned = dict.fromkeys([plugin] if plugin else [], "plugin")
        owned.update(dict.fromkeys((spec.solution for spec in group), "solution"))
        owned.update(dict.fromkeys(names, "kernel"))
        self._check_owners(owned, origin)
        for op in sorted({spec.op for spec in group}):
            mine = [spec for spec in self._by_op[op] if self._plugin_of[spec.name] in ("", plugin)]
            refuse_ties(self._contracts[op], [*mine, *(spec for spec in group if spec.op == op)])
        for spec in group:
            self._by_op[spec.op].append(spec)
            self._by_name[spec.name] = spec
            self._origin[spec.name] = origin
            self._plugin_of[spec.name] = plugin
        self._owner.update(dict.fromkeys(owned, origin))

    def add_plugin(self, record: PluginRecord) -> None:
        """Remember what became of a plugin."""
        self._check_open()
        self._plugins.append(record)

    def freeze(self, preferred_plugins: Sequence[str] = ()) -> Registry:
        """Settle the ties between plugins, sort by rank, and refuse changes from now on.

        Args:
            preferred_plugins: plugins that win their ties, the first choice first. Where two plugins tie on an op and
                neither is named here, both are disabled for that op; see `ties`.
        """
        choice = {name: rank for rank, name in enumerate(preferred_plugins)}
        for specs in self._by_op.values():
            specs.sort(
                key=lambda spec: (
                    -spec.band,
                    -spec.priority,
                    choice.get(self._plugin_of[spec.name], len(choice)),
                    spec.name,
                )
            )
        self._settle_ties(preferred_plugins)
        self._frozen = True
        return self

    def _settle_ties(self, preferred: Sequence[str]) -> None:
        pairs: dict[tuple[str, str], dict[str, str]] = {}
        for op, specs in sorted(self._by_op.items()):
            foreign = [spec for spec in specs if self._plugin_of[spec.name]]
            for tie in find_ties(self._contracts[op], foreign):
                first, second = self._plugin_of[tie.first.name], self._plugin_of[tie.second.name]
                if first != second and undecided(first, second, preferred):
                    kernels = f"{tie.first.name} and {tie.second.name} in band {tie.first.band.name}, priority {tie.first.priority}"
                    pairs.setdefault((min(first, second), max(first, second)), {}).setdefault(op, kernels)
        labels = {record.name: record.label for record in self._plugins if record.loaded}
        for pair, ops in sorted(pairs.items()):
            shown = "".join(f"\n  {op}: {kernels}" for op, kernels in ops.items())
            self._tie_messages.append(
                f"plugins {labels.get(pair[0], pair[0])} and {labels.get(pair[1], pair[1])} tie, and neither is used for "
                f"{', '.join(ops)}: some calls fit a kernel of each{shown}\n"
                f"Fix: set {PREFER}={pair[0]} (or {pair[1]}) to say which one wins, or keep one out."
            )
            for plugin, other in (pair, pair[::-1]):
                self._disable_for_ops(plugin, other, list(ops))

    def _disable_for_ops(self, plugin: str, other: str, ops: list[str]) -> None:
        why = f"plugin {plugin} ties with plugin {other} on this op; {PREFER}={plugin} (or {other}) decides"
        for op in ops:
            for spec in self._by_op[op]:
                if self._plugin_of[spec.name] == plugin:
                    self._tied.setdefault(spec.name, why)
        note = f"not used for {', '.join(ops)}: it ties with plugin {other}, {PREFER} decides"
        self._plugins = [
            replace(record, notes=(*record.notes, note)) if record.name == plugin and record.loaded else record
            for record in self._plugins
        ]

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

    def plugin_of(self, kernel: str) -> PluginRecord | None:
        """The plugin that the kernel of that name comes from; None for a kernel of this package."""
        name = self._plugin_of[kernel]
        return next((record for record in self._plugins if record.name == name and record.loaded), None)

    def tied(self, kernel: str) -> str | None:
        """Why the kernel of that name is disabled: its plugin ties with another one. None where it is not."""
        return self._tied.get(kernel)

    @property
    def ties(self) -> tuple[str, ...]:
        """One message for each pair of plugins that tie and are disabled for some ops; filled by `freeze`."""
        return tuple(self._tie_messages)

    def owner(self, name: str) -> str | None:
        """Distribution to which the name of a kernel, a solution or a plugin belongs; None where nobody has it."""
        return self._owner.get(name)

    def names(self) -> tuple[str, ...]:
        """Every kernel, solution and plugin name that is taken, sorted."""
        return tuple(sorted(self._owner))

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

    def _check_owners(self, names: dict[str, str], origin: str) -> None:
        """A name belongs to one distribution: whoever asks for it gets its kernel or an error, never another one's."""
        for name, kind in names.items():
            owner = self._owner.get(name)
            if owner is not None and owner != origin:
                raise RegistrationError(
                    f"registry: the {kind} name {name!r} of {origin} is taken by {owner}\n"
                    "Fix: rename it; names of kernels, solutions and plugins belong to one distribution each."
                )


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

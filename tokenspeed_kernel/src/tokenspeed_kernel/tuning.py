"""Measured choices: a file that says, for calls of certain formats and traits, which kernel was fastest on one machine.

Selection asks `choice_for`. What it answers depends on the file's content and on the call alone, so that the ranks of a job, each
reading the same file, choose alike. A file holds a table for each device that it was measured on, pinned to device, driver, library
and package versions. For a device of the same kind (CPU or GPU) on which one of these differs, the table is refused, loudly: a rank
that quietly ignored it would choose otherwise than its peers. A file is read once in a process.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform as machine
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tokenspeed_kernel._version import __version__
from tokenspeed_kernel.errors import ConfigError
from tokenspeed_kernel.platform import Platform, Vendor
from tokenspeed_kernel.traits import TraitValue

__all__ = ["Choice", "Table", "TuningError", "choice_for", "forget", "machine_pins", "read_tables", "write_table"]

_FORMAT: Final = 1
_FIX: Final = "run `tokenspeed-kernel tune` again on this machine, or unset TOKENSPEED_KERNEL_TUNING"


class TuningError(ConfigError):
    """A tuning file cannot be read, or was made on another device or with other versions."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One measured choice.

    Args:
        op: `family.op`.
        signature: formats of the operands, in text form.
        traits: of the call.
        kernel: the fastest one.
        instead_of: the kernel that rank would choose.
        time_us: of one call of `kernel`, cold cache; the geometric mean where several cases have these formats and traits.
        instead_of_us: of one call of `instead_of`.
    """

    op: str
    signature: str
    traits: tuple[tuple[str, TraitValue], ...]
    kernel: str
    instead_of: str
    time_us: float
    instead_of_us: float

    @property
    def note(self) -> str:
        """Why it was chosen, for an explanation."""
        return f"tuned: {self.time_us:.3g} us measured, {self.instead_of} {self.instead_of_us:.3g} us"


@dataclass(frozen=True, slots=True)
class Table:
    """Choices that hold on one machine.

    Args:
        pins: what must be the same, by name; see `machine_pins`.
        choices: what was measured.
    """

    pins: Mapping[str, str]
    choices: tuple[Choice, ...]

    def check(self, current: Mapping[str, str], path: str) -> None:
        """Refuse the table on another machine.

        Raises:
            TuningError: a pin differs; the message has each one.
        """
        differ = [
            f"{name}: measured with {self.pins.get(name) or 'none'}, here is {current.get(name) or 'none'}"
            for name in sorted({*self.pins, *current})
            if self.pins.get(name, "") != current.get(name, "")
        ]
        if differ:
            raise TuningError(f"tuning: {path} is of another machine or version\n  " + "\n  ".join(differ) + f"\nFix: {_FIX}.")


def choice_for(
    path: str, op: str, signature: str, traits: Mapping[str, TraitValue], platform: Platform
) -> Choice | None:
    """Return the measured choice for a call, or None where the file has none for it.

    Args:
        path: of the file.
        op: `family.op`.
        signature: formats of the operands that the call has, in text form.
        traits: of the call, all of them.
        platform: of this machine; for another one there is no choice.
    Raises:
        TuningError: the file cannot be read, or its table for this kind of device is of another machine or version.
    """
    tables = _load(path)
    kind = "cpu" if platform.vendor is Vendor.CPU else "gpu"
    table = tables.get(kind)
    if table is None:
        return None
    _check_once(path, kind, platform)
    return _index(path, kind).get((op, signature, tuple(sorted(traits.items()))))


def forget() -> None:
    """Read files again when they are next needed; for tests and tools."""
    for cached in (_load, _index, _check_once, _device_pins):
        cached.cache_clear()


def machine_pins(platform: Platform, libraries: Iterable[str]) -> dict[str, str]:
    """Return what a table is pinned to.

    Args:
        platform: of the device, which must be of this machine.
        libraries: distributions whose versions count; one that is not installed has an empty version.
    """
    pins = dict(_device_pins(platform))
    pins["tokenspeed-kernel"] = __version__
    pins["torch"] = torch.__version__
    pins.update({f"library {name}": _version(name) for name in sorted(set(libraries))})
    return pins


def read_tables(path: str | Path) -> dict[str, Table]:
    """Read a file: the table for each kind of device, `cpu` or `gpu`.

    Raises:
        TuningError: it cannot be read, or is not of this format.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TuningError(f"tuning: {path} cannot be read: {type(error).__name__}: {error}\nFix: {_FIX}.") from error
    try:
        if content["format"] != _FORMAT:
            raise TuningError(f"tuning: {path} has format {content['format']}, expected {_FORMAT}\nFix: {_FIX}.")
        return {kind: _table(one) for kind, one in content["tables"].items() if kind in ("cpu", "gpu")}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise TuningError(f"tuning: {path} is not a tuning file: {cause}\nFix: {_FIX}.") from error


def write_table(path: str | Path, kind: str, table: Table) -> None:
    """Write a table into a file, and keep the other kind's that is there.

    Args:
        path: of the file; it is made where there is none.
        kind: `cpu` or `gpu`.
        table: what to write.
    Raises:
        TuningError: the file is there but is no tuning file.
    """
    target = Path(path)
    tables = read_tables(target) if target.exists() else {}
    tables[kind] = table
    facts = {
        name: {"pins": dict(one.pins), "choices": [{**asdict(choice), "traits": dict(choice.traits)} for choice in one.choices]}
        for name, one in sorted(tables.items())
    }
    text = json.dumps({"format": _FORMAT, "tables": facts}, indent=1, sort_keys=True) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another rank may be reading.
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)


def _table(facts: dict[str, Any]) -> Table:
    choices = tuple(
        Choice(**{**one, "traits": tuple(sorted(one["traits"].items()))}) for one in facts["choices"]
    )
    pins = {str(name): str(value) for name, value in facts["pins"].items()}
    return Table(pins, choices)


@functools.cache
def _load(path: str) -> dict[str, Table]:
    return read_tables(path)


@functools.cache
def _index(path: str, kind: str) -> dict[tuple[str, str, tuple[tuple[str, TraitValue], ...]], Choice]:
    return {(one.op, one.signature, one.traits): one for one in _load(path)[kind].choices}


@functools.cache
def _check_once(path: str, kind: str, platform: Platform) -> None:
    table = _load(path)[kind]
    libraries = [name.removeprefix("library ") for name in table.pins if name.startswith("library ")]
    table.check(machine_pins(platform, libraries), path)


@functools.cache
def _device_pins(platform: Platform) -> dict[str, str]:
    pins = {"arch": platform.arch, "features": ",".join(sorted(platform.features))}
    if platform.vendor is Vendor.CPU:
        return {**pins, "device": _processor(), "driver": ""}
    return {**pins, "device": torch.cuda.get_device_name(), "driver": _driver()}


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, machine.processor() or machine.machine())


def _driver() -> str:
    for place in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        if Path(place).exists():
            return Path(place).read_text(encoding="utf-8").splitlines()[0].strip()
    return str(torch.version.cuda or torch.version.hip or "")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""

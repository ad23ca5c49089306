"""Memory of this process, as the operating system counts it."""

from __future__ import annotations

from dataclasses import dataclass

_STATUS = "/proc/self/status"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A snapshot; both are 0 where the system does not tell.

    Attributes:
        resident_bytes: physical memory that the process holds now, shared pages included.
        peak_bytes: the most that it ever held.
    """

    resident_bytes: int = 0
    peak_bytes: int = 0

    @classmethod
    def now(cls) -> ProcessMemory:
        """Ask the system."""
        try:
            with open(_STATUS, encoding="ascii") as file:
                facts = dict(line.split(":", 1) for line in file if line.startswith(("VmRSS", "VmHWM")))
            return cls(*(int(facts[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")))
        except (OSError, KeyError, ValueError):
            return cls()

"""A run beside a saved one: which rows became slower by more than noise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Change", "compare", "load"]

_CLOCK_US = 0.3
"""Two measurements of one kernel of a few microseconds differ by so much on an H200, whatever they are made of."""


@dataclass(frozen=True, slots=True)
class Change:
    """A row that is not as it was.

    Attributes:
        noise_us: a difference up to this says nothing.
    """

    family: str
    case: str
    was_us: float | None
    now_us: float | None
    noise_us: float
    note: str = ""

    @property
    def regressed(self) -> bool:
        """Slower than noise explains, or without a time where it had one."""
        if self.was_us is None:
            return False
        return self.now_us is None or self.now_us > self.was_us + self.noise_us

    @property
    def improved(self) -> bool:
        """Faster than noise explains, or with a time where it had none."""
        if self.now_us is None:
            return False
        return self.was_us is None or self.now_us < self.was_us - self.noise_us

    def __str__(self) -> str:
        was = "no time" if self.was_us is None else f"{self.was_us:.2f} us"
        now = "no time" if self.now_us is None else f"{self.now_us:.2f} us"
        change = f" ({self.now_us / self.was_us - 1:+.1%}, noise {self.noise_us:.2f} us)" if self.was_us and self.now_us else ""
        return f"{self.family}: {self.case}: {was} -> {now}{change}{'; ' if self.note else ''}{self.note}"


def load(path: Path) -> dict[str, Any]:
    """A saved result.

    Raises:
        SystemExit: it cannot be read, or `python -m perf hopper --json` did not write it.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"python -m perf hopper: {path} cannot be read: {error}") from error
    if not isinstance(report, dict) or not {"families", "rates", "machine"} <= report.keys():
        raise SystemExit(
            f"python -m perf hopper: {path} is no result of this command. "
            "Fix: name a file that `python -m perf hopper --json FILE` wrote."
        )
    return report


def compare(report: dict[str, Any], baseline: dict[str, Any], noise: float) -> list[Change]:
    """Every row of both, in the order of `report`; a family that `report` did not run is left out.

    A difference counts when it is beyond `noise` (a part of the baseline's time), beyond twice what the two measurements of a run
    were apart, and beyond the clock's 0.3 us.

    Raises:
        SystemExit: the two were measured on GPUs of different names.
    """
    here, there = report["machine"].get("gpu"), baseline["machine"].get("gpu")
    if here != there:
        raise SystemExit(
            f"python -m perf hopper: the baseline was measured on {there}, this run on {here}: their times cannot be compared. "
            f"Fix: save one on this GPU with --json."
        )
    changes = []
    for family, rows in report["families"].items():
        saved = {row["case"]: row for row in baseline["families"].get(family, ())}
        for row in rows:
            was = saved.pop(row["case"], None)
            if was is None:
                continue
            spread = 2 * (row.get("spread_us", 0.0) + was.get("spread_us", 0.0))
            noise_us = max(noise * (was["ours_us"] or 0.0), spread, _CLOCK_US)
            changes.append(Change(family, row["case"], was["ours_us"], row["ours_us"], noise_us, row["note"]))
        if not report.get("quick"):
            changes += [
                Change(family, case, was["ours_us"], None, 0.0, "the baseline has it, this run has not")
                for case, was in saved.items()
            ]
    return changes

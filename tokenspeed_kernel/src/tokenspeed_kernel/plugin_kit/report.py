"""What the conformance suite found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Area", "Finding", "Outcome", "Report"]


class Outcome(StrEnum):
    """Result of one check."""

    OK = "ok"
    FAILED = "FAIL"
    NOTE = "note"
    """Not a failure, but something to know: what could not be checked here."""


class Area(StrEnum):
    """What a check is about."""

    WHEEL = "wheel"
    METADATA = "metadata"
    CONTRACT = "contract"
    IMPORT = "import cost"
    CAPABILITY = "capability"
    NUMERICS = "numerics"
    FAKE = "fake tensors"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        area: what it is about.
        outcome: result.
        text: what was found; for a failure what was expected and what came.
        fix: what the plugin's author can do.
    """

    area: Area
    outcome: Outcome
    text: str
    fix: str = ""

    def as_facts(self) -> dict[str, str]:
        """As plain data."""
        return {"area": str(self.area), "outcome": str(self.outcome), "text": self.text, "fix": self.fix}

    @classmethod
    def from_facts(cls, facts: dict[str, str]) -> Finding:
        """The inverse of `as_facts`."""
        return cls(Area(facts["area"]), Outcome(facts["outcome"]), facts["text"], facts["fix"])


@dataclass(slots=True)
class Report:
    """All findings about one wheel.

    Args:
        subject: what was checked.
        findings: in the order of the checks.
    """

    subject: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        outcomes = [one.outcome for one in self.findings]
        return Outcome.OK in outcomes and Outcome.FAILED not in outcomes

    def ok(self, area: Area, text: str) -> None:
        """Add a check that passed."""
        self.findings.append(Finding(area, Outcome.OK, text))

    def note(self, area: Area, text: str) -> None:
        """Add what could not be checked."""
        self.findings.append(Finding(area, Outcome.NOTE, text))

    def fail(self, area: Area, text: str, fix: str) -> None:
        """Add a failure."""
        self.findings.append(Finding(area, Outcome.FAILED, text, fix))

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add findings."""
        self.findings.extend(findings)

    def failures(self) -> Sequence[Finding]:
        """The failures alone."""
        return [one for one in self.findings if one.outcome is Outcome.FAILED]

    def lines(self) -> Iterable[str]:
        """The report as text."""
        yield self.subject
        for one in self.findings:
            yield f"  {one.outcome:4}  {one.area:12}  " + one.text.replace("\n", "\n" + 22 * " ")
            if one.fix:
                yield 22 * " " + f"Fix: {one.fix}."
        counts = {outcome: sum(one.outcome is outcome for one in self.findings) for outcome in Outcome}
        verdict = "passed" if self.passed else "FAILED"
        yield f"{verdict}: {counts[Outcome.OK]} ok, {counts[Outcome.FAILED]} failed, {counts[Outcome.NOTE]} notes"

    def as_facts(self) -> dict[str, Any]:
        """As plain data."""
        return {"subject": self.subject, "passed": self.passed, "findings": [one.as_facts() for one in self.findings]}

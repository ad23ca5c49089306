"""The diagram in the documentation against the transitions in the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FSM = ROOT / "tokenspeed_engine" / "src" / "tokenspeed_engine" / "scheduler" / "csrc" / "fsm"


def documented() -> set[tuple[str, str, str]]:
    text = (ROOT / "docs" / "scheduler.md").read_text()
    return {(a, event, b) for a, b, event in re.findall(r"^ +(\w+) --> (\w+): (\w+)$", text, re.MULTILINE)}


def coded() -> set[tuple[str, str, str]]:
    code = (FSM / "transitions.h").read_text()
    found = re.findall(r"^inline (\w+) transition\((\w+)&&(?: \w+)?, (\w+)&&(?: \w+)?\)", code, re.MULTILINE)
    assert len(found) == code.count("inline ")
    return {(a, event, b) for b, a, event in found}


def drawn() -> set[tuple[str, str, str]]:
    """The diagram at the head of states.h."""
    return set(re.findall(r"^//   (\w+) --(\w+)--> (\w+)$", (FSM / "states.h").read_text(), re.MULTILINE))


def test_the_diagrams_are_the_code() -> None:
    assert documented() == drawn() == coded()
    assert len(coded()) == 41


def test_every_state_is_documented() -> None:
    variant = re.search(r"std::variant<([\w,\s]+)>", (FSM / "states.h").read_text())
    assert variant is not None
    states = {name.strip() for name in variant.group(1).split(",")}
    rows = re.findall(r"^\| (\w+) \| [\w, ]+ \|", (ROOT / "docs" / "scheduler.md").read_text(), re.MULTILINE)
    assert states == set(rows) - {"state", "owner"}  # the headings of two tables

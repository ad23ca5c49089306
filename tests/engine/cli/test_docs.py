"""docs/serving.md names every flag, exit status and metric that there is, and none that there is not."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tokenspeed_engine import core_process, launch
from tokenspeed_engine.config import add_flags
from tokenspeed_engine.metrics import EngineMetrics


def page(repository: Path) -> str:
    return (repository / "docs" / "serving.md").read_text(encoding="utf-8")


def first_cells(text: str, heading: str) -> set[str]:
    """Words in backquotes in the first column of a section's table."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_flag_is_documented(repository: Path) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    flags = {name for action in parser._actions for name in action.option_strings}
    assert first_cells(page(repository), "Flags") == flags


def test_every_metric_is_documented(repository: Path) -> None:
    documented = {re.sub(r"\{.*", "", name) for name in first_cells(page(repository), "Metrics")}
    metrics = EngineMetrics()
    names = set()
    for family in metrics.registry.collect():
        name = family.name.removeprefix("tokenspeed:")
        names.add(f"{name}_total" if family.type == "counter" else name)
    assert documented == names


def test_every_exit_status_is_documented(repository: Path) -> None:
    section = page(repository).split("## Signals and the end\n")[1].split("\n## ")[0]
    table = {
        int(word)
        for line in section.splitlines()
        if line.startswith("| ")
        for word in re.findall(r"^\| ([\d, ]+) \|", line)
        for word in word.split(", ")
    }
    assert table >= {value for name, value in vars(launch).items() if name.startswith("EXIT_")}
    own = section.split("The core's own status")[1]
    for value in (value for name, value in vars(core_process).items() if name.startswith("EXIT_")):
        assert re.search(rf"\b{value} ", own)

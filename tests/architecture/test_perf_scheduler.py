"""The benchmarks of the control plane run, and their own arithmetic is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def rows_of(repository: Path, tmp_path: Path, name: str) -> list[dict[str, Any]]:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "perf", name, "--quick", "--json", str(report)]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"][name]
    return rows


def test_scale(repository: Path, tmp_path: Path) -> None:
    rows = rows_of(repository, tmp_path, "scheduler.scale")
    steps = [row for row in rows if row["case"].startswith("step")]
    assert len(steps) == 2
    assert all(row["ours"] > 0 and "hit rate 9" in row["note"] for row in steps)


def test_replay(repository: Path, tmp_path: Path) -> None:
    rows = rows_of(repository, tmp_path, "scheduler.replay")
    hits = [row for row in rows if row["case"].endswith("hit rate")]
    assert len(hits) == 6
    for row in hits:
        assert 0 < row["ours"] <= row["peer"] <= 100, "no policy finds more than the best one"
    fairness = [row["ours"] for row in rows if "Jain" in row["case"]]
    assert all(0 < value <= 1 for value in fairness)


@pytest.fixture(scope="module")
def in_repository(repository: Path) -> Any:
    """Runs a snippet with `perf` importable, away from the test runner's own path."""

    def run(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], cwd=repository, check=True, timeout=60)

    return run


def test_the_oracle_by_hand(in_repository: Any) -> None:
    """Two conversations that take turns, in pools of 5 to 10 pages."""
    in_repository(
        "from perf.scheduler.oracle import belady_hit_rate\n"
        "from perf.scheduler.simulator import TurnRecord as T\n"
        "turns = [T(0, 0, 0, 39, 2, first_token_us=1, ended_us=2), T(1, 0, 3, 39, 2, first_token_us=4, ended_us=5),\n"
        "         T(0, 1, 6, 45, 1, first_token_us=7, ended_us=8), T(1, 1, 9, 45, 1, first_token_us=10, ended_us=11)]\n"
        # After its first turn each keeps 4 pages; a turn that runs holds 5. So of the one that waits, 0, 2, 3 or 4 pages are left.
        "hits = [round(belady_hit_rate(turns, pages, 10) * 168) for pages in (5, 7, 8, 9, 10)]\n"
        "assert hits == [0, 40, 60, 80, 80], hits\n"
    )


def test_a_replay_is_a_function_of_its_trace(in_repository: Any) -> None:
    in_repository(
        "from perf.scheduler.replay import Policy, config\n"
        "from perf.scheduler.simulator import StepModel, replay\n"
        "from perf.scheduler.traces import agentic\n"
        "def once():\n"
        "    sessions = agentic(3, scale=0.01)\n"
        "    found = replay(config(sessions, Policy('any', ttl_s=60, host_share=0.3)), sessions, StepModel())\n"
        "    assert all(t.arrived_us <= t.first_token_us <= t.ended_us for t in found.turns)\n"
        "    assert len(found.turns) == sum(len(s.turns) for s in sessions)\n"
        "    assert len(found.gaps_us) == sum(t.num_output - 1 for t in found.turns)\n"
        "    return [(t.first_token_us, t.ended_us, t.num_cached) for t in found.turns]\n"
        "assert once() == once()\n"
    )

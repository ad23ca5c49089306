"""`python -m perf` lists every benchmark and writes its schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def _perf(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perf", *arguments], cwd=repository, capture_output=True, text=True, check=False)


def test_lists_every_benchmark(repository: Path) -> None:
    modules = [
        p
        for p in (repository / "perf").rglob("*.py")
        if "\nBENCHMARK" in p.read_text() and len(p.relative_to(repository).parts) > 2
    ]
    result = _perf(repository)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(modules) >= 4


def test_an_unknown_name_is_refused_with_the_known_ones(repository: Path) -> None:
    result = _perf(repository, "no.such")
    assert result.returncode != 0
    assert "no.such" in result.stderr
    assert "kernel.dispatch" in result.stderr


@pytest.mark.parametrize("name", ["kernel.import_time"])
def test_rows_follow_the_schema(repository: Path, tmp_path: Path, name: str) -> None:
    report_file = tmp_path / "report.json"
    result = _perf(repository, name, "--quick", "--json", str(report_file))
    assert result.returncode == 0, result.stderr
    report = json.loads(report_file.read_text())
    assert {"command", "date", "machine", "versions", "benchmarks"} <= report.keys()
    rows = report["benchmarks"][name]
    assert rows
    for row in rows:
        assert {"case", "ours", "peer", "unit", "ratio", "limit", "share_of_limit", "goal", "note"} <= row.keys()


def test_a_ratio_above_one_is_always_better(repository: Path) -> None:
    code = (
        "from perf.harness import Row\n"
        "assert Row('a', 2.0, 4.0, 'us').ratio == 2.0 and Row('a', 4.0, 2.0, 'tok/s', limit=8.0).ratio == 2.0\n"
        "assert Row('a', 4.0, 2.0, 'tok/s', limit=8.0).share_of_limit == 0.5 \n"
        "assert Row('a', 2.0, None, 'us', limit=1.0).share_of_limit == 0.5\n"
        "assert Row('a', None, 2.0, 'us').ratio is None\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repository, check=True)


def test_the_cost_of_every_op_is_measured(repository: Path) -> None:
    """A new op needs a call in the benchmark of the overhead: its family's cases give one, or `perf/kernel/dispatch.py` does."""
    code = (
        "from perf.kernel.dispatch import calls\n"
        "from tokenspeed_kernel.registry import collect_builtin\n"
        "measured = {call[0] for call in calls()}\n"
        "assert measured == set(collect_builtin().ops()), set(collect_builtin().ops()) ^ measured\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr

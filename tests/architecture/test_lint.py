"""Lint and types are part of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def _run(repository: Path, *arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(arguments)}\n{result.stdout[-8000:]}{result.stderr[-2000:]}"


def test_ruff(repository: Path) -> None:
    _run(repository, "ruff", "check", "--no-cache", ".")


def test_mypy(repository: Path, tmp_path: Path) -> None:
    _run(repository, "mypy", "--cache-dir", str(tmp_path))

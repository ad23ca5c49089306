"""The repository stands alone, and its shape is fixed."""

from __future__ import annotations

import subprocess
from pathlib import Path

TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci",
    "tokenspeed_kernel", "tokenspeed_kernel_amd", "tokenspeed_mla", "tokenspeed_engine", "plugins", "tests", "perf", "docs",
}  # fmt: skip


def _tracked(repository: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True)
    return [repository / name for name in listing.stdout.split("\0") if name]


def test_top_level(repository: Path) -> None:
    found = {path.relative_to(repository).parts[0] for path in _tracked(repository)}
    assert found <= TOP_LEVEL, f"not a part of the layout: {sorted(found - TOP_LEVEL)}"


def test_nothing_reads_outside_the_repository(repository: Path) -> None:
    outside = "".join((".", "./sha", "red"))
    guilty = [
        str(path.relative_to(repository))
        for path in _tracked(repository)
        if path.is_file() and outside in path.read_bytes().decode("utf-8", errors="ignore")
    ]
    assert not guilty, f"{outside} is named in {guilty}"


def test_text_files_are_utf8_and_small(repository: Path) -> None:
    for path in _tracked(repository):
        if path.suffix in {".py", ".md", ".toml", ".h", ".hpp", ".cpp", ".txt", ".pyi"} and path.is_file():
            path.read_text(encoding="utf-8")
    large = [str(p) for p in _tracked(repository) if p.is_file() and p.stat().st_size > 2_000_000]
    assert not large, f"files over 2 MB do not belong in the repository: {large}"

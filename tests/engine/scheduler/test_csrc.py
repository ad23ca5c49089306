"""The C++ tests of the control plane, plain and under sanitizers, and what must not compile."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "csrc"
ROOT = HERE.parents[3]
CSRC = ROOT / "tokenspeed_engine" / "src" / "tokenspeed_engine" / "scheduler" / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
CASES = sorted((HERE / "compile_fail").glob("*.cpp"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++20 compiler")


def compile_only(source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    return subprocess.run(
        [COMPILER, *FLAGS, *flags, "-fsyntax-only", str(source)], check=False, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O1"], id="plain"),
        pytest.param(["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], id="sanitized"),
    ],
)
def test_unit_tests(tmp_path: Path, flags: list[str]) -> None:
    sources = [*HERE.glob("*.cpp"), *(CSRC / "cache").glob("*.cpp"), *(CSRC / "plan").glob("*.cpp")]

    def compile_object(source: Path) -> Path:
        target = tmp_path / f"{source.parent.name}_{source.stem}.o"
        assert COMPILER is not None
        done = subprocess.run(
            [COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(target)],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = [str(target) for target in pool.map(compile_object, sources)]
    program = tmp_path / "tests"
    assert COMPILER is not None
    linked = subprocess.run(
        [COMPILER, *flags, *objects, "-o", str(program)], check=False, capture_output=True, text=True, timeout=300
    )
    assert linked.returncode == 0, linked.stderr
    ran = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 failed" in ran.stdout


def test_there_are_cases() -> None:
    assert len(CASES) >= 10


@pytest.mark.parametrize("source", CASES, ids=lambda source: source.stem)
def test_must_not_compile(source: Path) -> None:
    """The twin differs in the one forbidden thing and compiles, so the failure has the reason that it should have."""
    twin = compile_only(source)
    assert twin.returncode == 0, twin.stderr
    forbidden = compile_only(source, "-DMUST_NOT_COMPILE")
    assert forbidden.returncode != 0
    reasons = ("use of deleted function", "no matching function", "cannot bind", "could not convert", "deleted")
    assert any(reason in forbidden.stderr for reason in reasons), forbidden.stderr

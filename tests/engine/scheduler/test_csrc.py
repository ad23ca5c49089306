"""The C++ tests of the control plane, plain and under sanitizers, and what must not compile."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "csrc"
ROOT = HERE.parents[3]
CSRC = ROOT / "tokenspeed_engine" / "src" / "tokenspeed_engine" / "scheduler" / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
FUZZ = HERE / "fuzz"
CASES = sorted((HERE / "compile_fail").glob("*.cpp"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++20 compiler")


def compile_only(source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    return subprocess.run(
        [COMPILER, *FLAGS, *flags, "-fsyntax-only", str(source)], check=False, capture_output=True, text=True, timeout=120
    )


# What each kind of build adds. The control plane has one thread: the sanitizer of threads must find no state that is shared.
BUILDS = {
    "sanitized": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "plain": ["-O2"],
    "threads": ["-O1", "-g1", "-fsanitize=thread"],
}
BUILT = [
    pytest.param("sanitized"),
    pytest.param("plain", marks=pytest.mark.slow),
    pytest.param("threads", marks=pytest.mark.slow),
]


def compiled(sources: list[Path], folder: Path, flags: list[str]) -> list[str]:
    def compile_object(source: Path) -> str:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        assert COMPILER is not None
        command = [COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_object, sources))


def linked(objects: list[str], program: Path, flags: list[str]) -> Path:
    assert COMPILER is not None
    done = subprocess.run(
        [COMPILER, *flags, *objects, "-o", str(program)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return program


def control_plane() -> list[Path]:
    return [*(CSRC / "cache").glob("*.cpp"), *(CSRC / "plan").glob("*.cpp")]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """Folder and objects of the control plane, compiled once for each kind of build."""

    @functools.cache
    def make(kind: str) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, compiled(control_plane(), folder, BUILDS[kind])

    return make


@pytest.mark.parametrize("kind", BUILT)
def test_unit_tests(build: Callable[[str], tuple[Path, list[str]]], kind: str) -> None:
    folder, objects = build(kind)
    tests = compiled(sorted(HERE.glob("*.cpp")), folder, BUILDS[kind])
    program = linked([*objects, *tests], folder / "tests", BUILDS[kind])
    ran = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 failed" in ran.stdout


def fuzzed(program: Path, folder: Path, seconds: float, seed: int, *options: str) -> str:
    command = [str(program), str(FUZZ / "corpus"), str(seconds), str(seed), *options]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300 + seconds, cwd=folder)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}{ran.stderr[-4000:]}\nThe input lies in {folder / 'crash'}"
    return ran.stdout


@pytest.mark.parametrize("kind", BUILT)
def test_fuzz_corpus(build: Callable[[str], tuple[Path, list[str]]], kind: str) -> None:
    """Every input that once reached something new, then a few seconds of mutations."""
    folder, objects = build(kind)
    driver = compiled(sorted(FUZZ.glob("*.cpp")), folder, BUILDS[kind])
    said = fuzzed(linked([*objects, *driver], folder / "fuzz", BUILDS[kind]), folder, seconds=3, seed=1)
    assert f"corpus {len(list((FUZZ / 'corpus').iterdir()))}," in said


@pytest.mark.slow
def test_fuzz_for_minutes(tmp_path: Path) -> None:
    """Guided by the edges that an input reaches; CONTROL_PLANE_FUZZ_SECONDS sets how long, another seed each hour."""
    flags = BUILDS["sanitized"]
    objects = compiled(control_plane(), tmp_path, [*flags, "-fsanitize-coverage=trace-pc"])
    driver = compiled(sorted(FUZZ.glob("*.cpp")), tmp_path, flags)
    program = linked([*objects, *driver], tmp_path / "fuzz", flags)
    said = fuzzed(program, tmp_path, float(os.environ.get("CONTROL_PLANE_FUZZ_SECONDS", "120")), int(time.time()) // 3600)
    assert int(said.rsplit("edges ", 1)[1]) > 3000


def test_the_driver_sees_a_fault(build: Callable[[str], tuple[Path, list[str]]], tmp_path: Path) -> None:
    """A token that is not the sequence's must be found: the check is not one that cannot fail."""
    _, objects = build("sanitized")
    source = (FUZZ / "fuzz_scheduler.cpp").read_text()
    broken = source.replace(
        "device_[static_cast<std::size_t>(step.slot_mapping[i])] = token;",
        "device_[static_cast<std::size_t>(step.slot_mapping[i] / 2 * 2)] = token;",
    )
    assert broken != source
    (tmp_path / "fuzz_scheduler.cpp").write_text(broken)
    driver = compiled([tmp_path / "fuzz_scheduler.cpp", FUZZ / "fuzz_main.cpp"], tmp_path, BUILDS["sanitized"])
    program = linked([*objects, *driver], tmp_path / "fuzz", BUILDS["sanitized"])
    ran = subprocess.run(
        [str(program), str(FUZZ / "corpus"), "1", "1"], check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert ran.returncode != 0
    assert "token_of" in ran.stderr


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

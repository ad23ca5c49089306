"""The collectives over Gloo, on groups of one, two and four processes: each runs all the checks of `comm_worker` once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

_WORKER = Path(__file__).with_name("comm_worker.py")
_SPEC = importlib.util.spec_from_file_location("comm_worker", _WORKER)
assert _SPEC is not None and _SPEC.loader is not None
worker = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worker)

Outcomes = list[dict[str, str]]
_TIMEOUT_S = 150


def _run(world_size: int, folder: Path, backend: str = "gloo") -> Outcomes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(_WORKER), str(rank), str(world_size), str(folder), backend],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcomes]:
    """What became of each check on each process of a group of that size; run when first asked for."""
    done: dict[int, Outcomes] = {}

    def of(world_size: int) -> Outcomes:
        if world_size not in done:
            done[world_size] = _run(world_size, tmp_path_factory.mktemp(f"group_of_{world_size}"))
        return done[world_size]

    return of


@pytest.mark.parametrize(
    ("check", "world_size"),
    [(check, size) for size in (1, 2, 4) for check in ("before initialisation", *worker.checks_of(size))],
)
def test_collectives(check: str, world_size: int, outcomes: Callable[[int], Outcomes]) -> None:
    for rank, results in enumerate(outcomes(world_size)):
        assert not results[check], f"rank {rank}:\n{results[check]}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", worker.DTYPES, ids=str)
@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_conformance(case: object, dtype: object, world_size: int, outcomes: Callable[[int], Outcomes]) -> None:
    """Every process's result against the reference's, which moves bytes by broadcasts and adds in float64."""
    for rank, results in enumerate(outcomes(world_size)):
        assert not results[f"{case} {dtype}"], f"rank {rank}:\n{results[f'{case} {dtype}']}"


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_conformance_over_nccl(world_size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    for rank, results in enumerate(_run(world_size, tmp_path, "nccl")):
        wrong = {name: text for name, text in results.items() if text}
        assert not wrong, f"rank {rank}: {', '.join(wrong)}\n{next(iter(wrong.values()))}"

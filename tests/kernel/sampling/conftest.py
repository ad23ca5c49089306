"""Where each solution is tested."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is imported; its kernels then run on the CPU, one operation at a time.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def device_of(solution: str) -> torch.device:
    """A Triton kernel is tested on the GPU where there is one."""
    return torch.device("cuda" if solution == "triton" and torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["reference", "cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Each solution in turn."""
    name: str = request.param
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton")
    return name


@pytest.fixture
def device(solution: str) -> torch.device:
    """Where that solution runs here."""
    return device_of(solution)

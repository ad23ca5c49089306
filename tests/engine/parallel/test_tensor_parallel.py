"""Two processes with half of every layer each compute what one computes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")


def _run(size: int, folder: Path, result: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(size), str(port), str(folder), str(result)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
    found: dict[str, Any] = torch.load(result, weights_only=True)
    return found


# Sizes that divide by two; biases, since one that every rank added would count twice.
@pytest.mark.parametrize("case", ["llama-tied-biased", "qwen3-window-biased"])
def test_two_ranks_equal_one(case: str, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make(case, tmp_path, vocab_size=212)
    one = _run(1, tmp_path, tmp_path / "one.pt")
    two = _run(2, tmp_path, tmp_path / "two.pt")
    assert two["ids"] == one["ids"]
    assert two["logits"].shape == one["logits"].shape == (37 + 11, 212)
    scale = float(one["logits"].abs().max())
    assert float((two["logits"] - one["logits"]).abs().max()) < 1e-5 * max(1.0, scale)

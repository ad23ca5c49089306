"""The Hopper prefill kernel compiles for sm_90a: asynchronous products that are not serialised, bulk copies, nothing spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_hopper_prefill.py"
REGISTERS, BLOCK_SHARED_BYTES = 65536, 232448
"""Of a multiprocessor, and of one block on sm_90. Source: CUDA programming guide, "Compute Capabilities"."""


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ragged d128", "ragged d64", "page 64 everything")]


@pytest.mark.parametrize("name", ["page 16", "mla", *_SLOW])
def test_machine_code(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon", exc_type=ImportError)
    old = version("triton").startswith("3.6.")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))[name]
    assert used["shared"] <= BLOCK_SHARED_BYTES, used
    assert used["registers"] * 384 <= REGISTERS, used
    # Scores are products of depth 16 over head_dim, values over a tile's 128 keys: 3 of each are in the code, 4 with a window.
    per_tile = {"ragged d64": 4 + 8, "mla": 12 + 8}.get(name, 8 + 8)
    tiles = 4 if name.endswith("everything") else 3
    assert sum(used["products"].values()) == 2 * tiles * per_tile, used
    assert set(used["products"]) == ({"m64n128k16", "m64n64k16"} if name == "ragged d64" else {"m64n128k16"}), used
    multiplying = [role for role in used["roles"] if role["products"]]
    assert len(multiplying) == 2, used
    for role in multiplying:
        assert role["waits"] <= 2 * tiles, role
        assert role["bulk_stores"] >= 1, role
        fastest = min(role["loops"], key=lambda loop: loop["instructions"])  # over tiles that need no mask
        assert fastest["products"] == per_tile, role
        # Triton 3.9 keeps more of a block's values in memory.
        assert fastest["in_memory"] <= (2 if old else 48), role
    assert sum(role["bulk_loads"] for role in used["roles"]) >= 5, used

"""The Hopper kernel compiles for sm_90a: asynchronous products, copies of 16 bytes, registers that roles exchange, none spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_hopper_dsa.py"
BLOCK_SHARED_BYTES = 232448
"""Of one block on sm_90. Source: CUDA programming guide, "Compute Capabilities"."""


def test_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon", exc_type=ImportError)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 4
    for name, used in report.items():
        keys = used["keys"]
        assert used["shared"] <= BLOCK_SHARED_BYTES, (name, used)
        # The scores take 36 products of depth 16; the values, for each of two groups of warps, two for each 16 keys.
        assert used["products"] == {f"m64n{keys}k16": 36, "m64n128k16": keys // 16 * 2}, (name, used)
        # One wait for each product would mean that the compiler serialised them.
        assert used["waits"] <= 3, (name, used)
        # Of the queries 36 for each thread, of a tile 9 for each 16 keys.
        assert used["copies"] == 36 + 9 * keys // 16, (name, used)
        assert used["narrow_copies"] == 1, (name, used)  # the slots themselves, for who masks the scores
        assert used["register_exchange"] >= 3, (name, used)
        assert used["registers"] == 128, (name, used)  # at the start: four groups of warps fill the register file
        # Where pages are no run of rows their division takes registers; a few of those who gather lie in memory.
        assert used["stack"] <= (16 if used["flat"] else 64), (name, used)

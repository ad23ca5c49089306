"""The Hopper decode kernel compiles for sm_90a: on the matrix units, with 16-byte asynchronous copies, and within a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_hopper.py"
REGISTERS, SHARED_BYTES, BLOCK_SHARED_BYTES = 65536, 233472, 232448
"""Of a multiprocessor of sm_90, and of one block. Source: CUDA programming guide, "Compute Capabilities"."""


def test_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    forms = json.loads(done.stdout.splitlines()[-1])
    assert len(forms) == 6
    for name, used in forms.items():
        # Where parts are merged some registers may spill, in the loop over tiles none.
        assert used["spills_in_loop"] == 0, (name, used)
        assert used["stack"] <= 128, (name, used)
        assert used["matrix"] >= 16, (name, used)
        assert used["wide_async_copies"] >= 16, (name, used)
        assert used["narrow_async_copies"] == 0, (name, used)
        # Those around the asynchronous copies: warps do not wait for each other's softmax.
        assert 1 <= used["barriers_in_loop"] <= 2, (name, used)
        assert used["shared"] <= BLOCK_SHARED_BYTES, (name, used)
        # All programs of a launch are resident.
        assert used["resident"] * used["registers"] * used["threads"] <= REGISTERS, (name, used)
        assert used["resident"] * (used["shared"] + 1024) <= SHARED_BYTES, (name, used)

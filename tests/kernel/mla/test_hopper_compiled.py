"""The Hopper decode kernels compile for sm_90a: asynchronous products, and bulk copies by a warp of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_hopper.py"
BLOCK_SHARED_BYTES = 232448
"""Of one block on sm_90. Source: CUDA programming guide, "Compute Capabilities"."""

WIDE = {"m64n128k16": 8, "m64n64k16": 36}


def test_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon", exc_type=ImportError)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 10
    for name, used in report.items():
        assert used["shared"] <= BLOCK_SHARED_BYTES, (name, used)
        if name.startswith("merge"):
            assert used["stack"] == 0, (name, used)
            assert used["registers"] <= 168, (name, used)  # three programs of 4 warps on a processor
            continue
        # Scores: 36 products of depth 16. Values: depth 64 for each 64 latent elements; or depth 64 for twice 128 of two groups.
        wide = name.startswith("wide")
        assert used["products"] == (WIDE if wide else {"m64n16k16": 36 + 32}), (name, used)
        assert used["waits"] <= 2, (name, used)
        assert used["bulk_copies"] >= 1, (name, used)
        assert used["register_exchange"] >= 2, (name, used)
        # Nothing with Triton 3.6, on the machines that run it; 3.9 keeps some addresses of each thread of `wide` in memory.
        assert used["stack"] <= (192 if wide and not used["old"] else 0), (name, used)
        assert used["stores_to_stack_in_loop"] <= (48 if wide and not used["old"] else 0), (name, used)

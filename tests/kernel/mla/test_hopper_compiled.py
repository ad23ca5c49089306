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


def test_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon", exc_type=ImportError)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 8
    for name, used in report.items():
        assert used["shared"] <= BLOCK_SHARED_BYTES, (name, used)
        if name.startswith("merge"):
            assert used["stack"] == 0, (name, used)
            assert used["registers"] <= 128, (name, used)  # two programs of 8 warps on a processor
            continue
        few = name.endswith("16 rows")
        # The scores are 36 products of depth 16, the values 4 for each 64 rows of the result and 256 of its columns.
        expected = {
            "stream b1 64 rows": {"m64n32k16": 36, "m64n256k16": 4},
            "stream b4 64 rows": {"m64n32k16": 36, "m64n64k16": 16},
        }
        assert used["products"] == expected.get(name, {"m64n16k16": 36 + 32}), (name, used)
        assert used["waits"] <= 2, (name, used)
        assert used["bulk_copies"] >= 1, (name, used)
        assert used["register_exchange"] >= 2, (name, used)
        # With 64 rows Triton 3.9 keeps a few addresses of each thread in memory, which the loop reads and does not write.
        assert used["stack"] <= (0 if few else 128), (name, used)
        assert used["stores_to_stack_in_loop"] == 0, (name, used)

"""The Triton kernels of the cache ops compile for GPUs that are not here: fp8 too, where the device has no conversion for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_kernels.py"


@pytest.mark.parametrize(
    "target", ["sm_80", "sm_90", "gfx942", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sm_100", "sm_120", "gfx950"))]
)
def test_kernels_compile(target: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    spills = json.loads(done.stdout.splitlines()[-1])
    assert len(spills) == 27
    assert all(count == 0 for count in spills.values()), spills

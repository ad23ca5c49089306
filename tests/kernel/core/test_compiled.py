"""The Triton kernels of the simple families compile for GPUs that are not here, and what comes out fits these GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_portable.py"
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536, "gfx950": 163840}
"""Shared memory that a block may use. Source: CUDA programming guide, "Compute Capabilities"; AMD CDNA 3 and 4 ISA guides."""


@pytest.mark.parametrize(
    "target", ["sm_90", "gfx942", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sm_80", "sm_100", "sm_120", "gfx950"))]
)
def test_kernels_compile_and_fit(target: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    by_dtype = json.loads(done.stdout.splitlines()[-1])[target]
    assert set(by_dtype) == {"bf16", "fp16", "fp32"}
    for dtype, kernels in by_dtype.items():
        assert len(kernels) == 11
        for name, used in kernels.items():
            assert used["spills"] <= 16, (dtype, name, used)
            assert used["shared"] <= SHARED_BYTES[target], (dtype, name, used)
            assert not used["tf32"], f"{name} {dtype}: fp32 products must be IEEE"
            if name.startswith("mm") and dtype != "fp32":
                assert used["matrix"], f"{name} {dtype} does not use the matrix units"

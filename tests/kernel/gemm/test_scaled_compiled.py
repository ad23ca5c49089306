"""The Triton kernels for quantized operands compile for GPUs that are not here, and what comes out fits these GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_scaled.py"
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536, "gfx950": 163840}
"""Shared memory that a block may use. Source: CUDA programming guide, "Compute Capabilities"; AMD CDNA 3 and 4 ISA guides."""
ALL = [pytest.param(target, "all", marks=pytest.mark.slow) for target in SHARED_BYTES]


@pytest.mark.parametrize(("target", "extent"), [("sm_90", "few"), *ALL])
def test_kernels_compile_and_fit(target: str, extent: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), target, extent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) > (20 if extent == "few" else 80)
    for name, used in kernels.items():
        assert used["spills"] <= 128, (name, used)
        assert used["shared"] <= SHARED_BYTES[target], (name, used)
        assert not used["tf32"], f"{name}: fp32 products must be IEEE"
        if name.startswith(("mm", "masked", "contiguous")) and " fp32 " not in name:
            assert used["matrix"], f"{name} does not use the matrix units"
        if "fp8_e4m3@token" in name and "512 rows" in name and target in ("sm_90", "sm_100", "sm_120", "gfx950"):
            assert used["fp8"], f"{name} does not give fp8 to the matrix units"

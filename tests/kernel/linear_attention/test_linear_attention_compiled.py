"""The Triton kernels compile for GPUs that are not here, and what comes out fits these GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_kernels.py"
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536, "gfx950": 163840}
"""Shared memory that a block may use. Source: CUDA programming guide, "Compute Capabilities"; AMD CDNA 3 and 4 ISA guides."""
CI = (("sm_90", "bf16"), ("gfx942", "bf16"))
REST = (*((target, "bf16") for target in ("sm_80", "sm_100", "sm_120", "gfx950")), *((target, "fp32") for target in SHARED_BYTES),
        ("sm_90", "fp16"), ("gfx950", "fp16"))  # fmt: skip


@pytest.mark.parametrize(("target", "dtype"), [*CI, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)])
def test_kernels_compile_and_fit(target: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), target, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])[dtype]
    assert len(kernels) == 15
    for name, used in kernels.items():
        # Bytes of stack on NVIDIA, registers on AMD. Products of float32 take no matrix unit; they are for comparison.
        assert used["spills"] <= (1024 if dtype == "fp32" else 512), (name, used)
        assert used["shared"] <= SHARED_BYTES[target], (name, used)
        assert not used["tf32"], f"{name}: fp32 products must be IEEE"
        if dtype != "fp32" and ("solve" in name or "scan" in name or "prefill" in name) and "conv" not in name:
            assert used["matrix"], f"{name} does not use the matrix units"

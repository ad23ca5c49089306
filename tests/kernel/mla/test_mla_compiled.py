"""The Triton kernels compile for GPUs that are not here, with the tiles that their launchers would choose, and fit these GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_kernels.py"
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536, "gfx950": 163840}
COUNTS = {"mla": 16, "dsa": 16, "attention": 2}
QUICK = (("mla", "sm_90"), ("dsa", "sm_90"), ("attention", "sm_90"))
SLOW = [(family, target) for target in SHARED_BYTES for family in COUNTS if (family, target) not in QUICK]


@pytest.mark.parametrize(("family", "target"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_kernels_compile_and_fit(family: str, target: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), family, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    without_fp8 = target in ("sm_80", "gfx942")
    more = 0 if family != "dsa" else -2 if without_fp8 else 2 if target == "sm_90" else 0
    assert len(kernels) == COUNTS[family] + more
    for name, used in kernels.items():
        # 64 rows of 512 accumulators fill the registers of two groups of warps: Triton 3.6 (on the machines that run it) keeps them
        # there, 3.9 puts a few of each thread's addresses into memory.
        wide = target in ("sm_90", "sm_100") and name.startswith(("paged", "sparse")) and used["matrix"] != "mma.sync"
        # Codes of packed rows are in registers, too: a few more addresses in memory on 3.9, a few numbers on AMD's.
        spills = (448 if wide else 128 if target.startswith("gfx") else 64) if "packed" in name else 320 if wide else 64
        assert used["spills"] <= spills, (name, used)
        assert used["shared"] <= SHARED_BYTES[target], (name, used)
        assert not used["tf32"], f"{name}: fp32 products must be IEEE"
        if name.startswith(("paged", "prefill", "sparse", "indexer")) and "fp32" not in name:
            assert used["matrix"], f"{name} does not use the matrix units"
    if target == "sm_90":  # the large tiles use the asynchronous products
        large = ("paged bf16 rows 128 page 64", "prefill bf16 rows 4096", "sparse bf16 heads 128")
        assert all(kernels[name]["matrix"] == "wgmma.mma" for name in large if name in kernels), kernels

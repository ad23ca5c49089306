"""The wheels build and install alone on another supported Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OTHER = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"


def _interpreter() -> str | None:
    candidates = [f"python{OTHER}", *map(str, Path.home().glob(f".pyenv/versions/{OTHER}.*/bin/python"))]
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tokenspeed_kernel", "tokenspeed_engine", "plugins/tokenspeed_kernel_cpu"])
def test_builds_and_installs_alone(repository: Path, tmp_path: Path, folder: str) -> None:
    """The other Python gets no torch: dependencies are left out, and what works without torch is run."""
    interpreter = _interpreter()
    if interpreter is None:
        pytest.skip(f"needs a Python {OTHER} with venv")
    subprocess.run([interpreter, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", repository / folder], check=True, cwd=tmp_path)
    code = {
        "tokenspeed_kernel": "import importlib.metadata as m; assert m.version('tokenspeed-kernel')",
        "plugins/tokenspeed_kernel_cpu": (
            "from tokenspeed_kernel_cpu import _kernels; assert _kernels.instruction_set() in ('', *_kernels.instruction_sets())"
        ),
        "tokenspeed_engine": (
            "from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig\n"
            "import numpy as np\n"
            "c = SchedulerConfig(num_pages=8, page_size=16, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)\n"
            "s = Scheduler(c)\n"
            "s.submit(1, np.arange(5, dtype=np.int32), 4, np.empty(0, np.int32))\n"
            "assert s.plan().num_tokens == 5\n"
        ),
    }[folder]
    subprocess.run([python, "-m", "pip", "install", "-q", "numpy"], check=True, cwd=tmp_path)
    subprocess.run([python, "-I", "-c", code], check=True, cwd=tmp_path)

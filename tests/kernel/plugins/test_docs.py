"""Every command of docs/plugins.md, in the order of the page, in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import clean_environment
import pytest


def _commands(repository: Path) -> list[str]:
    page = (repository / "docs" / "plugins.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture
def shell(repository: Path, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder like a checkout, and an environment whose pip has no network: it builds with the backend that is installed here."""
    environment = clean_environment.CleanEnvironment(tmp_path / "clean", "hatchling", "pytest", "pytest-timeout")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "tokenspeed_kernel").symlink_to(repository / "tokenspeed_kernel")
    bin_folder = environment.python.parent
    pip = bin_folder / "pip"
    pip.write_text(
        "#!/bin/sh\n"
        'command="$1"; shift\n'
        'case "$command" in install|wheel) set -- --no-index --no-build-isolation "$@";; esac\n'
        f'exec "{sys.executable}" -m pip --python "{environment.python}" "$command" --disable-pip-version-check "$@"\n'
    )
    pip.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")}
    return folder, {**kept, "PATH": f"{bin_folder}:/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull}


def test_every_command_of_the_page(repository: Path, shell: tuple[Path, dict[str, str]]) -> None:
    folder, environment = shell
    told: list[str] = []
    commands = _commands(repository)
    assert len(commands) >= 10
    for command in commands:
        done = subprocess.run(["/bin/sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        told.append(done.stdout)
    check = told[next(index for index, one in enumerate(commands) if " plugin check " in one)]
    assert "0 failed" in check and "passed: " in check
    explained = [out for command, out in zip(commands, told, strict=True) if " explain " in command]
    assert ["1. acme_kernels_rms_norm: chosen" in out for out in explained] == [True, False, False]
    assert "plugin acme_kernels (acme-kernels 0.1.0): disabled" in explained[1]
    assert "acme" not in explained[2], "as if it had never been there"
    assert any(re.search(r"\d+ passed", out) for out in told), "the project's own tests ran"


def test_the_limits_of_the_page_are_those_of_the_check(repository: Path) -> None:
    from tokenspeed_kernel.plugin_kit.report import Area
    from tokenspeed_kernel.plugin_kit.suite import IMPORT_BUDGET_MS

    page = (repository / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert f"at most {IMPORT_BUDGET_MS:g} ms of processor time" in page
    for area in Area:
        assert f"| {area} |" in page, f"the page does not say what {area} is"

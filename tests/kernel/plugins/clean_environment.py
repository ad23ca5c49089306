"""A virtual environment that sees torch and what torch needs, and nothing else of the running interpreter."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement

# What torch may bring along and these tests do without: pip finds its metadata, Python does not find the package.
_LEFT_OUT = ("triton", "pytorch-triton")


class CleanEnvironment:
    """A new virtual environment; wheels are installed into it without network."""

    def __init__(self, folder: Path, *also: str) -> None:
        """Make it: torch, what is named and their requirements are links to those that the running interpreter has."""
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        self.nothing = folder / "nothing"
        self.nothing.mkdir()
        linked = folder / "linked"
        linked.mkdir()
        for distribution in _closure(["torch", "packaging", "numpy", *also]):
            _link(distribution, linked)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "venv" / "lib" / version / "site-packages"
        (self.site / "linked.pth").write_text(f"{linked}\n")

    def pip(self, *arguments: str) -> str:
        """Run the running interpreter's pip on this environment, without network; return what it says."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *arguments]
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": "", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=self.folder)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def run(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run its Python where there is no compiler: nothing is on PATH, and no variable names one."""
        kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")}
        environment = {**kept, "PATH": str(self.nothing)}
        command = [str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=self.nothing)
        assert done.returncode == status, f"{' '.join(arguments)[:2000]}\n{done.stdout}{done.stderr}"
        return done


def build_wheel(project: Path, folder: Path) -> Path:
    """Build the wheel of a project with the build backend that is installed here."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(folder), str(project)]
    environment = {**os.environ, "PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def _closure(names: list[str]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional library of another build of torch
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return list(found.values())


def _link(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    files = distribution.files or []
    if distribution.name.lower() in _LEFT_OUT:
        files = [file for file in files if file.parts[0].endswith(".dist-info")]
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__", "bin")}:
        source = Path(str(distribution.locate_file(top)))
        place = folder / top
        if source.exists() and not place.exists():
            place.symlink_to(source)

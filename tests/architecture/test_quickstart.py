"""The set-up command leaves a torch that is there alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def setup(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", repository / "tokenspeed_engine" / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fake(site: Path, name: str, version: str) -> None:
    """A distribution that pip takes to be installed."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").touch()


def test_other_arguments_are_the_server_s(setup: ModuleType) -> None:
    """A model, and flags before and behind it; a flag alone as well."""
    assert setup.parse_arguments([]) == (False, [])
    assert setup.parse_arguments(["--port", "9000"]) == (False, ["--port", "9000"])
    arguments = ["--port", "9000", "MODEL", "--setup", "--api-key", "a", "b"]
    assert setup.parse_arguments(arguments) == (False, arguments)
    assert setup.parse_arguments(["MODEL", "--setup-only", "--port", "1"]) == (True, ["MODEL", "--port", "1"])


def test_paths_are_meant_from_the_caller_s_folder(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's, and the environment's: `quickstart.py model.gguf` beside the file."""
    (tmp_path / "environment" / "bin").mkdir(parents=True)
    (tmp_path / "environment" / "bin" / "python").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENSPEED_VENV", "environment")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "model.gguf"])
    for name in ("ensure_torch", "ensure_packages", "ensure_default_model"):
        monkeypatch.setattr(setup, name, lambda _: None)
    started: list[tuple[Path, list[str], Path]] = []
    monkeypatch.setattr(setup.os, "execv", lambda command, arguments: started.append((command, arguments, Path.cwd())))
    setup.main()
    command = tmp_path / "environment" / "bin" / "tokenspeed-engine"
    assert started == [(command, [str(command), "serve", "model.gguf"], tmp_path)]


def test_another_torch_that_is_installed_stays(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself resolves what the command asks for, of a package like ours, beside a torch of another version."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    _fake(site, "torch", "2.9.99+cpu")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "pip_install", lambda _, *arguments: asked.append(arguments))
    setup.ensure_packages(python)
    folders = {str(setup.ROOT / name) for name in setup.DISTRIBUTIONS}
    assert folders < {*asked[0], ""}
    # Our folders need a compiler and a package index: a local package with the same requirement stands for them.
    ours = tmp_path / "ours"
    _fake_source(ours)
    arguments = [one for one in asked[0] if one not in folders]
    command = [str(python), "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", *arguments, str(ours)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"pip would replace torch:\n{done.stdout}{done.stderr}"
    assert "Requirement already satisfied: torch" in done.stdout
    assert "Would install ours-1.0" in done.stdout


def _fake_source(folder: Path) -> None:
    """A source tree whose build backend is a file of its own."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "ours"\nversion = "1.0"\ndependencies = ["torch>=2.9"]\n'
    )
    (folder / "backend.py").write_text(
        "from pathlib import Path\n"
        "def prepare_metadata_for_build_wheel(directory, config_settings=None):\n"
        "    info = Path(directory) / 'ours-1.0.dist-info'\n"
        "    info.mkdir()\n"
        "    (info / 'METADATA').write_text('Metadata-Version: 2.1\\nName: ours\\nVersion: 1.0\\nRequires-Dist: torch>=2.9\\n')\n"
        "    return info.name\n"
        "def build_wheel(directory, config_settings=None, metadata_directory=None):\n"
        "    raise RuntimeError('only metadata are asked for')\n"
    )


@pytest.mark.parametrize(
    ("version", "is_taken"), [("2.8.0+cpu", False), ("1.13.1", False), ("2.9.0a0", True), ("2.13.0+cpu", True)]
)
def test_a_torch_that_is_too_old_is_named_and_left_alone(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    _fake(site, "torch", version)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()

    def pip_install(*_arguments: object) -> None:
        raise AssertionError("something was installed")

    monkeypatch.setattr(setup, "pip_install", pip_install)
    if is_taken:
        setup.ensure_torch(folder / "bin" / "python")
    else:
        with pytest.raises(SystemExit, match=rf"torch {version.replace('+', '.')} is installed, and at least 2\.9 is needed"):
            setup.ensure_torch(folder / "bin" / "python")

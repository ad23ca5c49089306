"""Writes a wheel project with one kernel that passes the conformance suite."""

from __future__ import annotations

import importlib.resources
import keyword
import re
import string
import sys
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from tokenspeed_kernel.errors import ConfigError
from tokenspeed_kernel.registry import collect_builtin

__all__ = ["new_project", "project_files"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_.]+[A-Za-z0-9]+)*")
_SUFFIX = ".tmpl"  # so that no tool takes a template for source
_PACKAGE = "package"


def new_project(name: str, folder: Path | None = None) -> Path:
    """Write a plugin project.

    Args:
        name: of the distribution, `acme-kernels`; its package, entry point and solution are `acme_kernels`.
        folder: where to; a new folder of that name in the working directory when None. It must not exist, or be empty.
    Returns:
        The folder.
    Raises:
        ConfigError: the name cannot be used, or there is something in the folder.
    """
    files = project_files(name)
    target = Path(name) if folder is None else folder
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"plugin new: {target} exists already\nFix: choose another name, or an empty folder with --directory.")
    for path, text in files.items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return target


def project_files(name: str) -> dict[str, str]:
    """Return what a project of that name consists of: path with forward slashes -> text.

    Raises:
        ConfigError: the name cannot be used.
    """
    distribution, package = _checked_names(name)
    files = {}
    for path, source in _templates(importlib.resources.files("tokenspeed_kernel.plugin_kit") / "template", PurePosixPath()):
        place = PurePosixPath(*(package if part == _PACKAGE else part for part in path.parts))
        text = string.Template(source.read_text(encoding="utf-8")).substitute(distribution=distribution, package=package)
        files[str(place).removesuffix(_SUFFIX)] = text
    return files


def _templates(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for one in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if one.is_dir():
            yield from _templates(one, path / one.name)
        elif one.name.endswith(_SUFFIX):
            yield path / one.name, one


def _checked_names(name: str) -> tuple[str, str]:
    """The distribution's and the package's name."""
    distribution = re.sub(r"[-_.]+", "-", name).lower()
    package = distribution.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise ConfigError(
            f"plugin new: {name!r} is no name for a Python package, expected letters, digits and single dashes\n"
            "Fix: choose a name such as acme-kernels."
        )
    taken = sys.stdlib_module_names | {"tokenspeed_kernel", "torch", "triton", "numpy"} | set(collect_builtin().names())
    if package in taken:
        raise ConfigError(
            f"plugin new: {package!r} is taken, by Python, PyTorch or a solution of tokenspeed-kernel\n"
            f"Fix: choose a name of your own, such as {distribution}-kernels."
        )
    return distribution, package

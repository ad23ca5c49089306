"""Plugins for the tests: small ones with a kernel whose result tells which one ran."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenspeed_kernel.plugin_kit.scaffold import project_files

_spec = importlib.util.spec_from_file_location("clean_environment", Path(__file__).with_name("clean_environment.py"))
assert _spec is not None and _spec.loader is not None
clean_environment: ModuleType = importlib.util.module_from_spec(_spec)
sys.modules["clean_environment"] = clean_environment
_spec.loader.exec_module(clean_environment)

PluginSource = Callable[..., str]
MakeWheel = Callable[..., Path]

_SOURCE = """
import torch
from tokenspeed_kernel import {imports}


def rms_norm(x, weight, *, eps=1e-6, out=None):
    result = torch.full_like(x, {value}, memory_format=torch.contiguous_format)
    return result if out is None else out.copy_(result)


PLUGIN = Plugin(
    api_version=(1, 0),
    specs=(
        KernelSpec(
            op="{op}", name="{name}_{kernel}", solution="{name}", band=Band.{band}, implementation="{name}_plugin:rms_norm",
            capability=Capability({targets}), formats=Signature.same(("x", "weight"), {formats}), requires={requires},
        ),
    ),
)
"""


@pytest.fixture(autouse=True)
def clean(clean_settings: None) -> None:
    """Every test here starts from the plain settings."""


@pytest.fixture
def plugin_source() -> PluginSource:
    """Source of the module `<name>_plugin`, whose kernel fills the output with `value`."""

    def source(
        name: str,
        value: float = 42,
        *,
        op: str = "norm.rms_norm",
        kernel: str = "rms_norm",
        band: str = "PLUGIN",
        targets: tuple[str, ...] = ("cpu",),
        formats: tuple[str, ...] = ("fp32",),
        requires: tuple[str, ...] = (),
    ) -> str:
        imports = "Band, Capability, KernelSpec, Plugin, Signature"
        facts = {"targets": repr(targets), "formats": repr(formats), "requires": repr(requires), "imports": imports}
        facts |= {"name": name, "value": str(value), "op": op, "kernel": kernel, "band": band}
        text = _SOURCE
        for key, fact in facts.items():
            text = text.replace("{" + key + "}", fact)
        return text

    return source


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """Write a wheel of what `plugin new` makes, with changes.

    `source` changes a file of the package by its name, `add` adds files to the wheel, `metadata` replaces lines of METADATA (None
    removes one), `tag` is the wheel's.
    """

    def make(
        name: str,
        *,
        source: dict[str, Callable[[str], str]] | None = None,
        add: dict[str, str] | None = None,
        metadata: dict[str, str | None] | None = None,
        entry_points: str | None = None,
        licence: str | None = "Do as you like.",
        tag: str = "py3-none-any",
        requires: tuple[str, ...] = ("torch",),
    ) -> Path:
        package = name.replace("-", "_")
        info = f"{package}-0.1.0.dist-info"
        files = {path.removeprefix("src/"): text for path, text in project_files(name).items() if path.startswith("src/")}
        for file, change in (source or {}).items():
            place = f"{package}/{file}"
            changed = change(files[place])
            assert changed != files[place], f"the change of {file} changes nothing"
            files[place] = changed
        fields: dict[str, str | None] = {
            "Metadata-Version": "2.4",
            "Name": name,
            "Version": "0.1.0",
            "Summary": "Kernels",
            "Requires-Python": ">=3.11",
            "License-Expression": "Apache-2.0",
            **({"License-File": "LICENSE"} if licence is not None else {}),
            **(metadata or {}),
        }
        body = fields.pop("Description", "# Kernels\n")
        lines = [f"{key}: {value}" for key, value in fields.items() if value is not None]
        lines += [f"Requires-Dist: {one}" for one in requires]
        files[f"{info}/METADATA"] = "\n".join([*lines, "", body or ""])
        files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n"
        if licence is not None:
            files[f"{info}/licenses/LICENSE"] = licence
        default = f"[tokenspeed_kernel.plugins]\n{package} = {package}.plugin:PLUGIN\n"
        files[f"{info}/entry_points.txt"] = default if entry_points is None else entry_points
        files |= add or {}
        rows = []
        for path, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(text.encode())}")
        files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
        wheel = tmp_path / f"{package}-0.1.0-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
        return wheel

    return make


@pytest.fixture(scope="session")
def kernel_wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout's kernel package."""
    wheel: Path = clean_environment.build_wheel(repository / "tokenspeed_kernel", tmp_path_factory.mktemp("wheel"))
    return wheel


@pytest.fixture(scope="session")
def kernel_environment(kernel_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An environment with that wheel. Tests leave it as they found it."""
    environment = clean_environment.CleanEnvironment(tmp_path_factory.mktemp("clean"))
    environment.told = environment.pip("install", str(kernel_wheel))
    return environment

"""Imports go one way: the code is held against the tables of docs/architecture.md."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("import_table", Path(__file__).with_name("import_table.py"))
assert _spec is not None and _spec.loader is not None
import_table = importlib.util.module_from_spec(_spec)
sys.modules["import_table"] = import_table
_spec.loader.exec_module(import_table)

PACKAGES = ("tokenspeed_kernel", "tokenspeed_engine", "tokenspeed_kernel_cpu")
PLUGINS = ("tokenspeed_kernel_cpu",)


def _source(repository: Path, package: str) -> Path:
    return repository / ("plugins" if package in PLUGINS else "") / package / "src" / package


def _kernel_exports(repository: Path) -> set[str]:
    tree = ast.parse((_source(repository, "tokenspeed_kernel") / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("tokenspeed_kernel/__init__.py has no __all__")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_table(repository: Path, package: str) -> None:
    tables = import_table.read_tables((repository / "docs" / "architecture.md").read_text())
    found = import_table.violations(package, _source(repository, package), tables[package], _kernel_exports(repository))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_row_of_the_table_exists(repository: Path, package: str) -> None:
    tables = import_table.read_tables((repository / "docs" / "architecture.md").read_text())
    folder = _source(repository, package)
    missing = [p for p in tables[package] if not (folder / p).is_dir() and not (folder / f"{p}.py").exists()]
    assert not missing, f"docs/architecture.md has rows for parts that are not there: {missing}"


def test_a_forbidden_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "types").mkdir()
    (tmp_path / "types" / "bad.py").write_text("def f():\n    from tokenspeed_engine.server import app\n")
    (tmp_path / "loop.py").write_text("from tokenspeed_kernel.registry import REGISTRY\nfrom . import types\n")
    found = import_table.violations("tokenspeed_engine", tmp_path, {"types": set(), "loop": {"types", "kernel ops"}}, set())
    assert len(found) == 2
    assert any("types imports tokenspeed_engine.server" in line for line in found)
    assert any("loop imports tokenspeed_kernel.registry" in line for line in found)


def test_a_plugin_may_import_what_the_kernel_package_exports_alone(tmp_path: Path) -> None:
    (tmp_path / "norm.py").write_text("from tokenspeed_kernel import Plugin\nfrom tokenspeed_kernel.dispatch import reset\n")
    found = import_table.violations("tokenspeed_kernel_cpu", tmp_path, {"norm": {"kernel ops"}}, {"Plugin"})
    assert len(found) == 1
    assert "norm imports tokenspeed_kernel.dispatch" in found[0]


def test_the_kernel_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, tokenspeed_kernel, tokenspeed_kernel.ops\n"
        "heavy = {'triton', 'transformers', 'flashinfer', 'deep_gemm', 'tensorrt_llm', 'cutlass', 'numpy.testing'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    # torch itself may import triton when a GPU build is installed: compare with torch alone.
    alone = subprocess.run(
        [sys.executable, "-c", code.replace(", tokenspeed_kernel, tokenspeed_kernel.ops", ", torch")],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ours.stdout == alone.stdout

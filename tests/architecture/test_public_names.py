"""Every public name is documented, and `__init__` files only export."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = {
    "tokenspeed_kernel": "tokenspeed_kernel",
    "tokenspeed_engine": "tokenspeed_engine",
    "tokenspeed_kernel_cpu": "plugins/tokenspeed_kernel_cpu",
}


def _files(repository: Path) -> Iterator[Path]:
    for package, folder in PACKAGES.items():
        yield from sorted((repository / folder / "src" / package).rglob("*.py"))


def _public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for child in node.body:
                    if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
                        yield f"{node.name}.{child.name}", child


def _is_triton_kernel(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(d) for d in getattr(node, "decorator_list", []))


def _overloads_or_inherits(node: ast.AST) -> bool:
    return any("overload" in ast.unparse(d) or "override" in ast.unparse(d) for d in getattr(node, "decorator_list", []))


def test_every_module_and_public_name_has_a_docstring(repository: Path) -> None:
    missing = []
    for path in _files(repository):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(f"{path.relative_to(repository)}: the module")
        for name, node in _public_definitions(tree):
            if _is_triton_kernel(node) or _overloads_or_inherits(node):
                continue
            if ast.get_docstring(node) is None:  # type: ignore[arg-type]
                missing.append(f"{path.relative_to(repository)}: {name}")
    assert not missing, "no docstring:\n" + "\n".join(missing)


def test_init_files_only_export(repository: Path) -> None:
    wrong = []
    for path in _files(repository):
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            exports = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
            if not (docstring or exports or isinstance(node, (ast.Import, ast.ImportFrom))):
                wrong.append(f"{path.relative_to(repository)}:{node.lineno}: {type(node).__name__}")
    assert not wrong, "an __init__.py holds more than imports and __all__:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    for info in [None, *pkgutil.walk_packages(module.__path__, prefix=f"{package}.")]:
        name = package if info is None else info.name
        if info is not None and not info.ispkg:
            continue
        loaded = importlib.import_module(name)
        for exported in getattr(loaded, "__all__", ()):
            assert hasattr(loaded, exported), f"{name}.__all__ names {exported}, which is not there"


def test_public_functions_state_shapes_errors_and_source() -> None:
    """The contract of STYLE: Args, Returns, Raises and Source in the docstring of each function that a family exports."""
    from tokenspeed_kernel import ops

    incomplete = []
    families = [m for m in pkgutil.iter_modules(ops.__path__) if m.ispkg]
    assert len(families) >= 8
    for family in families:
        package = importlib.import_module(f"tokenspeed_kernel.ops.{family.name}")
        for name in package.__all__:
            function = getattr(package, name)
            if not inspect.isfunction(function):
                continue
            text = inspect.getdoc(function) or ""
            lacking = [word for word in ("Args:", "Returns:", "Raises:", "Source:") if word not in text]
            if lacking:
                incomplete.append(f"{family.name}.{name}: no {', '.join(lacking)}")
    assert not incomplete, "\n".join(incomplete)

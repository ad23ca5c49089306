"""Checks of a wheel's Python source, without importing it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Final

from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.plugin_kit.wheel import Wheel

__all__ = ["check_imports", "parameters_in_source"]

_ROOT: Final = "tokenspeed_kernel"
_PUBLIC_PARTS: Final = ("ops", "testing")


def check_imports(wheel: Wheel, report: Report) -> None:
    """Add what it imports of the kernel package: only the public contract holds from one version to the next."""
    private: dict[str, list[str]] = {}
    for path, text in wheel.sources():
        try:
            tree = ast.parse(text, filename=path)
        except SyntaxError as error:
            report.fail(Area.CONTRACT, f"{path}: {error.msg} in line {error.lineno}", "correct the file")
            continue
        for name, line in _imports(tree):
            if not _is_public(name):
                private.setdefault(name, []).append(f"{path}:{line}")
    for name, places in sorted(private.items()):
        report.fail(
            Area.CONTRACT,
            f"{places[0]} imports {name}, which is not part of the plugin contract",
            "import from tokenspeed_kernel, tokenspeed_kernel.ops or tokenspeed_kernel.testing",
        )
    if not private:
        report.ok(Area.CONTRACT, "imports nothing but the public contract of tokenspeed_kernel")


def parameters_in_source(wheel: Wheel, implementation: str) -> tuple[str, ...] | None:
    """Parameter names of `module:function` as the source has them; None where it has no such function in Python."""
    module, _, attribute = implementation.partition(":")
    stem = module.replace(".", "/")
    for path, text in wheel.sources():
        if path not in (f"{stem}.py", f"{stem}/__init__.py"):
            continue
        try:
            body = ast.parse(text).body
        except SyntaxError:
            return None
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == attribute and not node.decorator_list:
                arguments = node.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                extra = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
                return tuple(one.arg for one in (*named, *extra))
    return None


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.partition(".")[0] == _ROOT)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == _ROOT:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == _ROOT else [str(node.module)]
            yield from ((name, node.lineno) for name in names)


def _is_public(name: str) -> bool:
    rest = name.partition(".")[2]
    part = rest.partition(".")[0]
    return not rest or part in _PUBLIC_PARTS or (rest == part and part in importlib.import_module(_ROOT).__all__)

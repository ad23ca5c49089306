"""Reads the import tables of docs/architecture.md, and the imports of the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNEL = "tokenspeed_kernel"
ENGINE = "tokenspeed_engine"
PLUGINS = ("tokenspeed_kernel_cpu",)
KERNEL_OPS = "kernel ops"
EVERYTHING = "everything"


@dataclass(frozen=True)
class Import:
    """One import statement of one of our packages."""

    part: str
    target: str
    where: str


def read_tables(page: str) -> dict[str, dict[str, set[str]]]:
    """Tables under "## Import directions": package -> part -> what it may import."""
    section = page.split("## Import directions", 1)[1].split("\n## ", 1)[0]
    tables: dict[str, dict[str, set[str]]] = {}
    package = ""
    for line in section.splitlines():
        if line.startswith("### "):
            package = line.removeprefix("### ").strip()
            tables[package] = {}
        elif line.startswith("| `"):
            part, allowed = (cell.strip() for cell in line.strip("|").split("|"))
            tables[package][part.strip("`")] = {name.strip() for name in allowed.split(",") if name.strip()}
    return tables


def part_of(module: str) -> str:
    """`tokenspeed_engine.server.app` -> `server`; the root package itself -> ``."""
    return module.split(".")[1] if "." in module else ""


def imports_of(package: str, folder: Path) -> Iterator[Import]:
    """Every import of our packages, wherever in a file it stands."""
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        parts = [*relative.with_suffix("").parts]
        module = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
        is_package = parts[-1] == "__init__"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            for target in _targets(node, module, is_package):
                if target.split(".")[0] in (KERNEL, ENGINE, *PLUGINS):
                    yield Import(part_of(module), target, f"{path}:{getattr(node, 'lineno', 0)}")


def _targets(node: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            anchor = module.split(".")
            anchor = anchor[: len(anchor) - node.level + (1 if is_package else 0)]
            base = ".".join([*anchor, base] if base else anchor)
        if base in (KERNEL, ENGINE, *PLUGINS):
            # `from tokenspeed_engine import types`: the name may be a part.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield base


def violations(package: str, folder: Path, table: dict[str, set[str]], kernel_exports: set[str]) -> list[str]:
    """Imports that the table does not allow, one line each."""
    found = []
    for item in imports_of(package, folder):
        if item.part in ("", "__main__"):
            continue  # the root package only exports; a test of its own checks that
        if item.part not in table:
            found.append(f"{item.where}: part {item.part!r} has no row in docs/architecture.md")
            continue
        allowed = table[item.part]
        target_package, target_part = item.target.split(".")[0], part_of(item.target)
        if EVERYTHING in allowed:
            continue
        if target_package != package:
            public = target_part == "ops" or target_part in kernel_exports
            if not (target_package == KERNEL and KERNEL_OPS in allowed and public):
                found.append(f"{item.where}: {item.part} imports {item.target}; it may import {sorted(allowed)}")
        elif target_part != item.part and target_part not in allowed and target_part not in ("_version", "__version__"):
            found.append(f"{item.where}: {item.part} imports {item.target}; it may import {sorted(allowed)}")
    return found

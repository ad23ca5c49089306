"""Find every benchmark under ``perf/``: any module that defines ``BENCHMARK`` (or another name that is asked for)."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from perf.harness import Benchmark

ROOT = Path(__file__).resolve().parent


def _defines(path: Path, name: str) -> bool:
    """Read rather than import: listing the benchmarks must not import torch and every peer."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    targets: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def module_names() -> list[str]:
    """Dotted names of the modules that define a benchmark, sorted."""
    return modules_defining("BENCHMARK")


def modules_defining(name: str, folder: str = ".") -> list[str]:
    """Dotted names of the modules below a folder of ``perf/`` that assign `name`, sorted; not those of ``perf/`` itself."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if len(relative.parts) > 1 and _defines(path, name):
            found.append(".".join(("perf", *relative.with_suffix("").parts)))
    return found


def load(module_name: str) -> Benchmark:
    """Import one benchmark's module.

    Raises:
        TypeError: its ``BENCHMARK`` is not a `Benchmark`.  SystemExit: our packages are not installed.
    """
    try:
        benchmark = importlib.import_module(module_name).BENCHMARK
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tokenspeed_"):
            raise
        raise SystemExit(
            f"python -m perf: {error}. Fix: run it with the Python that has this checkout's packages, such as .venv/bin/python "
            "(python3 tokenspeed_engine/quickstart.py --setup-only makes it)."
        ) from error
    if not isinstance(benchmark, Benchmark):
        raise TypeError(f"{module_name}.BENCHMARK is a {type(benchmark).__name__}; it must be a perf.harness.Benchmark")
    return benchmark

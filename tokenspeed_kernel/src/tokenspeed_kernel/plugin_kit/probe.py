"""Runs in the fresh interpreter that `suite` starts: step `load` imports the wheel's plugins, step `run` runs their kernels."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.config import DISABLE, DISABLE_PLUGINS, PREFER, KernelConfig
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.plugin_kit.capability import check_capability
from tokenspeed_kernel.plugin_kit.numerics import check_numerics
from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.plugin_kit.wheel import read_wheel
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP, Plugin, load_plugins, make_plugin
from tokenspeed_kernel.registry import Registry, collect_builtin

__all__ = ["main"]

# Never needed to say which kernels there are, and slow to import or in need of a driver.
_HEAVY: Final = {
    *("triton", "cutlass", "flashinfer", "flash_mla", "deep_gemm", "tensorrt_llm", "transformers"),
    *("numba", "cupy", "jax", "tvm", "scipy"),
}


def main(task: dict[str, Any]) -> None:
    """Do one step and write the answer.

    Args:
        task: `step`, `site` (the unpacked wheel), `wheel` (its file), `answer` (the file to write).
    """
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    # Settings of whoever runs the suite must not decide about a wheel.
    for variable in (DISABLE, DISABLE_PLUGINS, PREFER):
        os.environ.pop(variable, None)
    dispatch.configure(None)
    found = importlib.metadata.distributions(path=[task["site"]])
    entry_points = [one for dist in found for one in dist.entry_points if one.group == ENTRY_POINT_GROUP]
    answer = _load(task, entry_points) if task["step"] == "load" else _run(task, entry_points)
    Path(task["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _load(task: dict[str, Any], entry_points: list[importlib.metadata.EntryPoint]) -> dict[str, Any]:
    report = Report("")
    plugins: dict[str, Plugin] = {}
    modules = set(sys.modules)
    before = _process_state()
    start = time.process_time()
    for entry_point in entry_points:
        try:
            plugins[entry_point.name] = make_plugin(entry_point)
        except TokenSpeedKernelError as error:
            report.fail(Area.CONTRACT, f"plugin {entry_point.name}: {type(error).__name__}: {error}", "correct what it says")
        except Exception as error:  # noqa: BLE001 - someone else's code; the cause is shown
            what = f"plugin {entry_point.name} does not load: {type(error).__name__}: {error}"
            report.fail(Area.CONTRACT, what, "import in the module of the kernel what only the kernel needs")
    import_ms = (time.process_time() - start) * 1e3
    changed = [f"{name}: {old} before, {new} after" for name, old, new in _differences(before, _process_state())]
    new = sorted(set(sys.modules) - modules)
    _check_imported(report, new, plugins, Path(task["site"]))
    for text in changed:
        report.fail(Area.IMPORT, f"the import changes the process: {text}", "leave the state of the process alone")
    if not changed:
        report.ok(Area.IMPORT, "leaves the process as it was")
    wheel = read_wheel(Path(task["wheel"]))
    registry = _register(report, entry_points) if len(plugins) == len(entry_points) else None
    if registry is not None:
        specs = [spec for plugin in plugins.values() for spec in plugin.specs]
        if not specs:
            report.fail(Area.CONTRACT, "it has no kernels", "add a KernelSpec")
            registry = None
        else:
            report.ok(Area.CONTRACT, f"API {_versions(plugins)}, {len(specs)} kernels, registered as a whole: {', '.join(plugins)}")
            check_capability(registry, specs, wheel, report)
    tops = sorted({name.partition(".")[0] for name in new})
    findings = [one.as_facts() for one in report.findings]
    return {"import_ms": import_ms, "modules": tops, "findings": findings, "loaded": registry is not None}


def _run(task: dict[str, Any], entry_points: list[importlib.metadata.EntryPoint]) -> dict[str, Any]:
    report = Report("")
    registry = _register(report, entry_points)
    if registry is not None:
        specs = [spec for one in entry_points for spec in make_plugin(one).specs]
        with dispatch.use_registry(registry):
            check_numerics(registry, specs, read_wheel(Path(task["wheel"])), report)
    return {"findings": [one.as_facts() for one in report.findings]}


def _register(report: Report, entry_points: list[importlib.metadata.EntryPoint]) -> Registry | None:
    registry = collect_builtin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is in the records
        load_plugins(registry, KernelConfig(), entry_points)
    failed = [record for record in registry.plugins if record.error]
    for record in failed:
        report.fail(Area.CONTRACT, f"plugin {record.name} is refused: {record.error.partition(chr(10))[0]}", _remedy(record.error))
    registry.freeze()
    for message in registry.ties:
        report.fail(Area.CONTRACT, message.partition("\n")[0], "give the kernels of one wheel different priorities")
    return None if failed or registry.ties else registry


def _remedy(error: str) -> str:
    return error.partition("\nFix: ")[2].removesuffix(".") or "correct the spec"


def _versions(plugins: dict[str, Plugin]) -> str:
    return ", ".join(sorted({f"{one.api_version[0]}.{one.api_version[1]}" for one in plugins.values()}))


def _check_imported(report: Report, new: list[str], plugins: dict[str, Plugin], site: Path) -> None:
    needed = {library.module.partition(".")[0] for one in plugins.values() for spec in one.specs for library in spec.libraries}
    own = {path.name.removesuffix(".py") for path in site.iterdir()}
    tops = {name.partition(".")[0] for name in new}
    heavy = sorted(tops & (_HEAVY | (needed - own)))
    native = [name for name in new if _is_native_of(name, site)]
    for name in (*heavy, *native):
        report.fail(Area.IMPORT, f"reading the plugin imports {name}", "import it in the module that holds the kernel")
    if not (heavy or native):
        report.ok(Area.IMPORT, f"imports nothing heavy ({len(new)} modules)")


def _is_native_of(name: str, site: Path) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return Path(file).suffix in (".so", ".pyd") and Path(file).is_relative_to(site)


def _process_state() -> dict[str, Any]:
    """What a plugin must not change when it is read."""
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.initial_seed()": torch.initial_seed(),
        "torch.cuda.is_initialized()": bool(torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        "environment": dict(os.environ),
        "working directory": str(Path.cwd()),
        "sys.path": list(sys.path),
        "threads": sorted(one.name for one in threading.enumerate()),
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
        "handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "sys.excepthook": sys.excepthook,
    }


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    found = [(name, before[name], after[name]) for name in before if before[name] != after[name]]
    # A whole environment on one line tells nobody what was changed in it.
    keys = [
        (f"environment variable {key}", before["environment"].get(key), after["environment"].get(key))
        for key in sorted({*before["environment"], *after["environment"]})
        if before["environment"].get(key) != after["environment"].get(key)
    ]
    return [one for one in found if one[0] != "environment"] + keys

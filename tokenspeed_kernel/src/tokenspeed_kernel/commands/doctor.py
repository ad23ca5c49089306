"""`doctor`: the machine, the libraries, the plugins and the settings, and which kernels each missing thing costs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform as machine
import warnings
from typing import Any

from tokenspeed_kernel._version import __version__
from tokenspeed_kernel.commands.command import Command, Status, columns
from tokenspeed_kernel.commands.facts import platform_facts, platform_text, plugin_facts
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.platform import Platform, Vendor, current_platform
from tokenspeed_kernel.plugins import load_registry
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, Verdict, evaluate, library_problem
from tokenspeed_kernel.spec import Band, KernelSpec, Library
from tokenspeed_kernel.tuning import TuningError, choice_for, read_tables

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    config = KernelConfig.from_env()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = load_registry(config)
    platform = current_platform()
    facts: dict[str, Any] = {
        "version": __version__,
        "python": machine.python_version(),
        "torch": _torch_facts(),
        "platform": platform_facts(platform),
        "kernels": len(list(registry)),
        "ops": len(registry.ops()),
        "libraries": [_library_facts(registry, platform, config, one) for one in _libraries(registry)],
        "plugins": [plugin_facts(record) for record in registry.plugins],
        "warnings": [str(one.message) for one in caught],
        "disabled": sorted(config.disabled),
        "tuning": _tuning_facts(config, platform),
        "reference_only": _reference_only(registry, platform, config),
    }
    facts["problems"] = _problems(registry, facts)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(platform, facts)
    return Status.FAILED if facts["problems"] else Status.OK


def _torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": []}
    if torch.cuda.is_available():
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def _libraries(registry: Registry) -> list[Library]:
    """Each library that some kernel needs, once for each version asked for."""
    found = {library: None for spec in registry for library in spec.libraries}
    return sorted(found, key=lambda one: (one.module, one.version))


def _library_facts(registry: Registry, platform: Platform, config: KernelConfig, library: Library) -> dict[str, Any]:
    problem = library_problem(library)
    users = [spec for spec in registry if library in spec.libraries]
    here = [spec for spec in users if _runs_on(spec, platform, config)]
    try:
        version = importlib.metadata.version(library.distribution or library.module)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {
        "library": library.module,
        "requirement": library.requirement,
        "version": version,
        "problem": "" if problem is None else problem.text,
        "remedy": "" if problem is None else problem.remedy,
        # Not installed at all is a choice; there but unusable is a fault.
        "installed": problem is None or importlib.util.find_spec(library.module.partition(".")[0]) is not None,
        "kernels_here": {spec.name: spec.op for spec in here},
        "kernels_elsewhere": {spec.name: spec.op for spec in users if spec not in here},
    }


def _runs_on(spec: KernelSpec, platform: Platform, config: KernelConfig) -> bool:
    interpreted = spec.capability.interpreter and platform.vendor is Vendor.CPU and config.triton_interpreter
    return interpreted or spec.capability.mismatch(platform) is None


def _reference_only(registry: Registry, platform: Platform, config: KernelConfig) -> list[str]:
    """Ops for which nothing but the reference can run here, whatever the call."""
    lacking = []
    for op in registry.ops():
        candidates = evaluate(registry, Request(op, platform, config=config))
        if not any(one.verdict is Verdict.ELIGIBLE and one.spec.band is not Band.REFERENCE for one in candidates):
            lacking.append(op)
    return lacking


def _tuning_facts(config: KernelConfig, platform: Platform) -> dict[str, Any] | None:
    """The file of measured choices, and why it is refused on this machine."""
    if not config.tuning:
        return None
    facts: dict[str, Any] = {"file": config.tuning, "choices": 0, "problem": ""}
    try:
        kind = "cpu" if platform.vendor is Vendor.CPU else "gpu"
        table = read_tables(config.tuning).get(kind)
        # Asking for any choice holds the table's pins against this machine.
        choice_for(config.tuning, "", "", {}, platform)
    except TuningError as error:
        return {**facts, "problem": str(error)}
    return {**facts, "choices": len(table.choices) if table is not None else 0}


def _problems(registry: Registry, facts: dict[str, Any]) -> list[str]:
    """What is broken, as against not installed."""
    found = [f"plugin {record.label}: {record.error}" for record in registry.plugins if record.error]
    told = " ".join(found)
    found += [text for text in facts["warnings"] if not any(one.error and one.error in text for one in registry.plugins)]
    if facts["tuning"] is not None and facts["tuning"]["problem"]:
        found.append(facts["tuning"]["problem"])
    for library in facts["libraries"]:
        if library["problem"] and library["installed"] and library["problem"] not in told:
            found.append(library["problem"])
    return found


def _print(platform: Platform, facts: dict[str, Any]) -> None:
    torch = facts["torch"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"HIP {torch['hip']}" if torch["hip"] else "CPU build"
    print(f"tokenspeed-kernel {facts['version']}, Python {facts['python']}, torch {torch['version']} ({build})")
    print(f"platform: {platform_text(platform)}")
    for index, name in enumerate(torch["devices"]):
        print(f"  cuda:{index}: {name}")
    print(f"{facts['kernels']} kernels of {facts['ops']} ops")
    rows = [("library", "version", "state", "costs")]
    for one in facts["libraries"]:
        state = "ok" if not one["problem"] else one["problem"]
        rows.append((one["requirement"], one["version"] or "-", state, _costs(one)))
    if len(rows) > 1:
        print("\n".join(columns(rows)))
    for one in facts["libraries"]:
        if one["problem"] and one["kernels_here"]:
            lost = ", ".join(f"{kernel} ({op})" for kernel, op in one["kernels_here"].items())
            print(f"without {one['library']} this machine lacks: {lost}")
            if one["remedy"]:
                print(f"Fix: {one['remedy']}.")
    for one in facts["plugins"]:
        print(f"plugin {one['name']} ({one['distribution']}): {one['status']}")
    if not facts["plugins"]:
        print("no plugin is installed")
    if facts["disabled"]:
        print(f"disabled by TOKENSPEED_KERNEL_DISABLE: {', '.join(facts['disabled'])}")
    if facts["tuning"] is not None:
        print(f"measured choices: {facts['tuning']['choices']} for this device in {facts['tuning']['file']}")
    if facts["reference_only"]:
        print(f"nothing but the reference runs here for: {', '.join(facts['reference_only'])}")
    for text in facts["problems"]:
        print(f"PROBLEM {text}")
    print(f"{len(facts['problems'])} problems." if facts["problems"] else "No problem.")


def _costs(library: dict[str, Any]) -> str:
    here, elsewhere = len(library["kernels_here"]), len(library["kernels_elsewhere"])
    verb = "used by" if not library["problem"] else "lost:"
    return f"{verb} {here} kernels for this machine, {elsewhere} for others"


COMMAND = Command("doctor", "what is here and what is missing, and which kernels that costs", _add_arguments, _run, order=3)

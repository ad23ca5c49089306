"""The conformance suite: everything that is held against one wheel.

The wheel is read as a file first. Then it is unpacked into a folder of its own and loaded there by fresh interpreters, which see no
other plugin: one for what its import costs and changes, one that runs its kernels. A crash of theirs is a finding.
"""

from __future__ import annotations

import compileall
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tokenspeed_kernel.errors import ConfigError
from tokenspeed_kernel.plugin_kit.metadata import check_metadata, entry_points_of
from tokenspeed_kernel.plugin_kit.report import Area, Finding, Report
from tokenspeed_kernel.plugin_kit.source import check_imports
from tokenspeed_kernel.plugin_kit.wheel import Wheel, read_wheel
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP

__all__ = ["IMPORT_BUDGET_MS", "check_wheel"]

IMPORT_BUDGET_MS: Final = 50.0
"""Processor time that reading all plugins of one wheel may take: every process that uses an op pays it."""
# A busy machine must not fail a wheel: where the budget is exceeded by no more than its double, the shortest of so many counts.
_ATTEMPTS: Final = 3
_DOUBTFUL: Final = 3.0
_BOOT: Final = (
    "import json, sys; task = json.loads(sys.argv[1]); sys.path[:] = task['path']; "
    "from tokenspeed_kernel.plugin_kit import probe; probe.main(task)"
)


def check_wheel(path: Path, *, static: bool = False, timeout_s: float = 1800.0) -> Report:
    """Hold a plugin wheel against the contract.

    Args:
        path: the wheel file; it need not be installed, and is not installed by this.
        static: leave out what runs its kernels.
        timeout_s: seconds after which a step is given up as failed.
    Raises:
        PluginError: the file is no wheel.
        ConfigError: the timeout is not positive.
    """
    if not timeout_s > 0:
        raise ConfigError(f"plugin check: expected a timeout above 0 s, got {timeout_s:g} s\nFix: leave --timeout out.")
    wheel = read_wheel(path)
    report = Report(path.name)
    check_metadata(wheel, report)
    check_imports(wheel, report)
    if not entry_points_of(wheel):
        report.fail(
            Area.CONTRACT,
            f"no entry point in the group {ENTRY_POINT_GROUP}: nothing would find the plugin",
            f'add [project.entry-points."{ENTRY_POINT_GROUP}"] to pyproject.toml',
        )
        return report
    if not wheel.fits:
        return report
    with tempfile.TemporaryDirectory(prefix="tokenspeed-plugin-check-") as scratch:
        folder = Path(scratch)
        site = folder / "site"
        wheel.unpack(site)
        compileall.compile_dir(site, quiet=2)  # as an installer does; a syntax error is told when it is imported
        loaded = _load(wheel, folder, site, timeout_s, report)
        if loaded and static:
            report.note(Area.NUMERICS, "left out: nothing shows here that the kernels are right")
        elif loaded:
            facts = _probe(wheel, folder, site, "run", timeout_s, report, Area.NUMERICS)
            report.extend(Finding.from_facts(one) for one in facts.get("findings", ()))
    return report


def _load(wheel: Wheel, folder: Path, site: Path, timeout_s: float, report: Report) -> bool:
    """Add what loading it costs and brings; say whether its kernels can be run."""
    least: dict[str, Any] = {}
    for _ in range(_ATTEMPTS):
        facts = _probe(wheel, folder, site, "load", timeout_s, report, Area.IMPORT)
        if not facts:
            return False
        if not least or facts["import_ms"] < least["import_ms"]:
            least = facts
        if not IMPORT_BUDGET_MS < least["import_ms"] <= _DOUBTFUL * IMPORT_BUDGET_MS:
            break
    cost = f"{least['import_ms']:.1f} ms of processor time of a budget of {IMPORT_BUDGET_MS:g} ms"
    if least["import_ms"] > IMPORT_BUDGET_MS:
        slow = ", ".join(least["modules"][:8]) or "its own modules alone"
        fix = "import what the kernels need in the module that holds them"
        report.fail(Area.IMPORT, f"{cost}; it imports {slow}", fix)
    else:
        report.ok(Area.IMPORT, cost)
    report.extend(Finding.from_facts(one) for one in least["findings"])
    return bool(least["loaded"])


def _probe(
    wheel: Wheel, folder: Path, site: Path, step: str, timeout_s: float, report: Report, area: Area
) -> dict[str, Any]:
    """Run one step in a fresh interpreter; return what it wrote, or nothing after adding why not."""
    answer = folder / f"{step}.json"
    answer.unlink(missing_ok=True)
    task = {
        "step": step,
        "site": str(site),
        "wheel": str(wheel.path.resolve()),
        "answer": str(answer),
        "path": [str(site), *(str(Path(entry).resolve()) for entry in sys.path if entry)],
    }
    command = [sys.executable, "-c", _BOOT, json.dumps(task)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        report.fail(area, f"no end after {timeout_s:g} s", "look for a dead lock or an endless loop, or give --timeout")
        return {}
    if done.returncode == 0 and answer.exists():
        facts: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return facts
    how = f"ended with status {done.returncode}"
    if done.returncode < 0:
        how = f"was ended by {signal.Signals(-done.returncode).name}"
    last = "\n".join(done.stderr.strip().splitlines()[-12:])
    report.fail(area, f"the interpreter that {_DOING[step]} {how}\n{last}".rstrip(), "run the kernel's tests under a debugger")
    return {}


_DOING: Final = {"load": "imported the plugin", "run": "ran its kernels"}

"""`plugin new` and `plugin check`: for those who write plugins."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenspeed_kernel.commands.command import Command, Status

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="{new,check}")
    new = actions.add_parser("new", help="write a wheel project with one kernel, which passes the check at once")
    new.add_argument("name", help="of the distribution: acme-kernels")
    new.add_argument("--directory", type=Path, help="where to write it; ./NAME where left out")
    check = actions.add_parser("check", help="hold a plugin wheel against the contract")
    check.add_argument("wheel", type=Path, help="the .whl file; it need not be installed")
    check.add_argument("--static", action="store_true", help="do not run its kernels (where their device is not at hand)")
    check.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="give up a step after so long")
    check.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    return _new(options) if options.action == "new" else _check(options)


def _new(options: argparse.Namespace) -> int:
    from tokenspeed_kernel.plugin_kit.scaffold import new_project, project_files

    folder = new_project(options.name, options.directory)
    print(f"wrote {folder}:")
    print("\n".join(f"  {path}" for path in project_files(options.name)))
    place = folder if folder.is_absolute() else f"./{folder}"  # without the dot pip takes it for a name in the index
    print(f"next: pip wheel --no-deps --wheel-dir dist {place}, then tokenspeed-kernel plugin check dist/*.whl")
    return Status.OK


def _check(options: argparse.Namespace) -> int:
    from tokenspeed_kernel.plugin_kit.suite import check_wheel

    report = check_wheel(options.wheel, static=options.static, timeout_s=options.timeout)
    print(json.dumps(report.as_facts(), indent=2) if options.json else "\n".join(report.lines()))
    return Status.OK if report.passed else Status.FAILED


COMMAND = Command("plugin", "start a plugin project; check a plugin wheel", _add_arguments, _run, order=50)

"""`list`: every kernel, where it runs, what it takes, how it was verified."""

from __future__ import annotations

import argparse
import json

from tokenspeed_kernel.commands.command import Command, Status, columns
from tokenspeed_kernel.commands.facts import (
    formats_text,
    platforms_text,
    plugin_facts,
    plugin_lines,
    spec_facts,
    verified_text,
)
from tokenspeed_kernel.commands.questions import ops_of
from tokenspeed_kernel.plugins import load_registry

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="*", help="only these ops or families")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    registry = load_registry()
    wanted = set(ops_of(registry, options.op))
    specs = [spec for spec in registry if spec.op in wanted]
    if options.json:
        plugins = [plugin_facts(record) for record in registry.plugins]
        print(json.dumps({"kernels": [spec_facts(registry, spec) for spec in specs], "plugins": plugins}, indent=2))
        return Status.OK
    rows = [("op", "kernel", "solution", "band", "platforms", "formats", "verified")]
    rows += [
        (spec.op, spec.name, spec.solution, spec.band.name, platforms_text(spec), formats_text(spec), verified_text(spec))
        for spec in specs
    ]
    print("\n".join([*columns(rows), *plugin_lines(registry)]))
    return Status.OK


COMMAND = Command("list", "every kernel: where it runs, what it takes, how it was verified", _add_arguments, _run, order=1)

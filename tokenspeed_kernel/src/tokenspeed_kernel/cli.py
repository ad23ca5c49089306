"""Command line: list the kernels, and explain why one is chosen."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tokenspeed_kernel._version import __version__
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import ConfigError, FormatError, TokenSpeedKernelError
from tokenspeed_kernel.platform import current_platform, parse_platform
from tokenspeed_kernel.plugins import load_registry
from tokenspeed_kernel.registry import PluginRecord, Registry
from tokenspeed_kernel.selection import Candidate, Request, Verdict, evaluate, suggest_fix
from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import KernelSpec
from tokenspeed_kernel.traits import TraitValue

__all__ = ["main"]

_USAGE_ERROR = 2
_NONE_ELIGIBLE = 1
# What a shell shows of a program that SIGPIPE ended.
_READER_GONE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; those of the process where left out.
    Returns:
        Exit status: 0; 1 when `explain` finds no eligible kernel; 2 for a mistake in the arguments; 141 when nobody reads on.
    """
    options = _parser().parse_args(arguments)
    try:
        config = KernelConfig.from_env()
        registry = load_registry(config)
        status = _list(registry, options) if options.command == "list" else _explain(registry, config, options)
        sys.stdout.flush()
        return status
    except TokenSpeedKernelError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except BrokenPipeError:
        # The reader, `head` say, has seen enough. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenspeed-kernel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tokenspeed-kernel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="every kernel: where it runs, what it takes, how it was verified")
    listing.add_argument("op", nargs="?", help="only this op or family")
    listing.add_argument("--json", action="store_true", help="print JSON")
    explain = commands.add_parser("explain", help="the kernels of an op in order of rank, each with why not")
    explain.add_argument("op", help="family.op, as listed")
    explain.add_argument("--platform", help="pretend to be on cpu, sm_90, gfx950, ...; this machine where left out")
    explain.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[OPERAND=]FORMAT",
        help="format of every operand that can have it, or of one (bf16, x=bf16, weight=fp8_e4m3@channel)",
    )
    explain.add_argument("--trait", action="append", default=[], metavar="NAME=VALUE", help="a property of the call")
    explain.add_argument("--solution", help="insist on this solution or kernel")
    explain.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _list(registry: Registry, options: argparse.Namespace) -> int:
    wanted = options.op
    if wanted is not None and not any(op.startswith(f"{wanted}.") for op in registry.ops()):
        wanted = registry.contract(wanted).name
    specs = [spec for spec in registry if wanted is None or spec.op == wanted or spec.op.startswith(f"{wanted}.")]
    plugins = [_plugin_facts(record) for record in registry.plugins]
    if options.json:
        print(json.dumps({"kernels": [_spec_facts(registry, spec) for spec in specs], "plugins": plugins}, indent=2))
        return 0
    rows = [("op", "kernel", "solution", "band", "platforms", "formats", "verified")]
    rows += [
        (spec.op, spec.name, spec.solution, spec.band.name, _platforms(spec), _formats(spec), _verified(spec))
        for spec in specs
    ]
    print("\n".join(_columns(rows)))
    for plugin in plugins:
        print(f"plugin {plugin['name']} ({plugin['distribution']}): {plugin['status']}")
    return 0


def _explain(registry: Registry, config: KernelConfig, options: argparse.Namespace) -> int:
    contract = registry.contract(options.op)
    platform = parse_platform(options.platform) if options.platform else current_platform()
    request = Request(
        contract.name,
        platform,
        _signature(registry, contract.name, options.dtype),
        _traits(contract.name, [trait.name for trait in contract.traits], options.trait),
        options.solution,
        config,
    )
    candidates = list(evaluate(registry, request))
    chosen = next((one.spec.name for one in candidates if one.verdict is Verdict.ELIGIBLE), None)
    plugins = [_plugin_facts(record) for record in registry.plugins]
    if options.json:
        facts = {
            "request": str(request),
            "op": contract.name,
            "summary": contract.summary,
            "platform": {"arch": platform.arch, "vendor": platform.vendor, "features": sorted(platform.features)},
            "pretended": options.platform is not None,
            "chosen": chosen,
            "candidates": [_candidate_facts(registry, one) for one in candidates],
            "plugins": plugins,
        }
        print(json.dumps(facts, indent=2))
    else:
        pretended = " (pretended)" if options.platform else ""
        features = f" with {', '.join(sorted(platform.features))}" if platform.features else ""
        print(f"{request}{pretended}{features}\n{contract.summary}")
        for rank, one in enumerate(candidates, 1):
            print("\n".join(_candidate_lines(rank, one, one.spec.name == chosen)))
        if chosen is None:
            print(f"No kernel is eligible.\nFix: {suggest_fix(registry, request, candidates)}.")
        for trait in contract.traits:
            if trait.name not in request.traits:
                print(f"  trait {trait.name} is open: {trait.doc}")
        for plugin in plugins:
            print(f"plugin {plugin['name']} ({plugin['distribution']}): {plugin['status']}")
    return 0 if chosen is not None else _NONE_ELIGIBLE


def _candidate_lines(rank: int, candidate: Candidate, chosen: bool) -> Iterable[str]:
    spec = candidate.spec
    verdict = "chosen" if chosen else str(candidate.verdict)
    yield f"  {rank}. {spec.name}: {verdict} ({spec.band.name}, solution {spec.solution}; {_verified(spec)})"
    yield from (f"       {reason.text}" for reason in candidate.reasons)
    yield from (f"       if {condition}" for condition in candidate.conditions)


def _signature(registry: Registry, op: str, texts: Iterable[str]) -> Signature | None:
    """The formats asked for; an operand for which nothing was said stays open."""
    operands = registry.contract(op).operands
    formats: dict[str, Format] = {}
    for text in texts:
        operand, named, value = text.rpartition("=")
        fmt = Format.parse(value)
        if named:
            if operand not in operands:
                raise FormatError(f"{op}: unknown operand {operand!r}\nFix: {_hint(operand, operands)}.")
            formats[operand] = fmt
            continue
        takers = {name for spec in registry.specs(op) for one in spec.formats for name, had in one if had == fmt}
        # Where no kernel takes the format, every operand has it, so that the explanation can say who wants what.
        formats.update({name: fmt for name in operands if name in takers or not takers})
    return Signature.of(**formats) if formats else None


def _traits(op: str, known: Sequence[str], texts: Iterable[str]) -> dict[str, TraitValue]:
    values: dict[str, TraitValue] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in known:
            what = f"unknown trait {name!r}" if separator else f"expected NAME=VALUE, got {text!r}"
            raise ConfigError(f"{op}: {what}\nFix: {_hint(name, known)}.")
        values[name] = _value(value)
    return values


def _value(text: str) -> TraitValue:
    words: dict[str, TraitValue] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}"


def _platforms(spec: KernelSpec) -> str:
    features = "".join(f"+{feature}" for feature in sorted(spec.capability.features))
    return ", ".join(target + features for target in spec.capability.targets)


def _formats(spec: KernelSpec) -> str:
    """All formats that some operand may have, in order; the exact combinations are in the JSON output."""
    names = dict.fromkeys(str(fmt) for signature in spec.formats for _, fmt in signature)
    return ", ".join(names) or "any"


def _verified(spec: KernelSpec) -> str:
    return ", ".join(str(one) for one in spec.verified) or ("the truth" if spec.band == 0 else "not verified yet")


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _spec_facts(registry: Registry, spec: KernelSpec) -> dict[str, Any]:
    return {
        "op": spec.op,
        "kernel": spec.name,
        "solution": spec.solution,
        "band": spec.band.name,
        "priority": spec.priority,
        "origin": registry.origin(spec.name),
        "targets": list(spec.capability.targets),
        "features": sorted(spec.capability.features),
        "interpreter": spec.capability.interpreter,
        "formats": [{operand: str(fmt) for operand, fmt in signature} for signature in spec.formats],
        "traits": [constraint.describe(name) for name, constraint in spec.traits.items()],
        "requires": [library.requirement for library in spec.libraries],
        "graph_safe": spec.graph_safe,
        "verified": [{"by": str(one.by), "on": one.on, "note": one.note} for one in spec.verified],
    }


def _candidate_facts(registry: Registry, candidate: Candidate) -> dict[str, Any]:
    return {
        **_spec_facts(registry, candidate.spec),
        "verdict": str(candidate.verdict),
        "reasons": [reason.text for reason in candidate.reasons],
        "conditions": list(candidate.conditions),
    }


def _plugin_facts(record: PluginRecord) -> dict[str, str]:
    status = "loaded" if record.loaded else "disabled" if record.disabled else f"failed: {record.error}"
    return {"name": record.name, "distribution": record.distribution, "status": status}


if __name__ == "__main__":
    sys.exit(main())

"""`explain`: the kernels of an op in order of rank, each with why not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace

from tokenspeed_kernel.commands.command import Command, Status
from tokenspeed_kernel.commands.facts import candidate_facts, platform_facts, plugin_facts, plugin_lines, verified_text
from tokenspeed_kernel.commands.questions import signature_of, traits_of
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.dispatch import default_registry
from tokenspeed_kernel.errors import ConfigError
from tokenspeed_kernel.platform import Platform, current_platform, parse_platform
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Candidate, Request, Verdict, check_solution, evaluate, suggest_fix
from tokenspeed_kernel.signature import Format

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="family.op, as listed")
    parser.add_argument("--platform", help="pretend to be on cpu, sm_90, gfx950, ...; this machine where left out")
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[OPERAND=]FORMAT",
        help="format of every operand that can have it, or of one (bf16, x=bf16, weight=fp8_e4m3@channel)",
    )
    parser.add_argument("--trait", action="append", default=[], metavar="NAME=VALUE", help="a property of the call")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="shape of one tensor of a whole call, x=16x4096; traits then follow from the shapes",
    )
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of that call, causal=false")
    parser.add_argument("--case", metavar="LABEL", help="the call of one of the op's cases, instead of shapes")
    parser.add_argument("--solution", help="insist on this solution or kernel")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    config = KernelConfig.from_env()
    registry = default_registry()
    contract = registry.contract(options.op)
    platform = parse_platform(options.platform) if options.platform else current_platform()
    request = replace(
        _request(registry, contract.name, platform, options), platform=platform, solution=options.solution, config=config
    )
    if options.solution is not None:
        check_solution(registry, request)
    candidates = list(evaluate(registry, request))
    chosen = next((one.spec.name for one in candidates if one.verdict is Verdict.ELIGIBLE), None)
    if options.json:
        facts = {
            "request": str(request),
            "op": contract.name,
            "summary": contract.summary,
            "platform": platform_facts(platform),
            "pretended": options.platform is not None,
            "chosen": chosen,
            "candidates": [candidate_facts(registry, one) for one in candidates],
            "plugins": [plugin_facts(record) for record in registry.plugins],
        }
        print(json.dumps(facts, indent=2))
        return Status.OK if chosen is not None else Status.FAILED
    pretended = " (pretended)" if options.platform else ""
    features = f" with {', '.join(sorted(platform.features))}" if platform.features else ""
    print(f"{request}{pretended}{features}\n{contract.summary}")
    for rank, one in enumerate(candidates, 1):
        print("\n".join(_lines(rank, one, one.spec.name == chosen)))
    if chosen is None:
        print(f"No kernel is eligible.\nFix: {suggest_fix(registry, request, candidates)}.")
    for trait in contract.traits:
        if trait.name not in request.traits:
            print(f"  trait {trait.name} is open: {trait.doc}")
    for line in plugin_lines(registry):
        print(line)
    return Status.OK if chosen is not None else Status.FAILED


def _request(registry: Registry, op: str, platform: Platform, options: argparse.Namespace) -> Request:
    """From formats and traits, or from a whole call."""
    whole_call = bool(options.shape or options.arg or options.case)
    if whole_call and options.trait:
        raise ConfigError(f"{op}: --trait beside --shape, --arg or --case\nFix: leave --trait out, the call decides about traits.")
    if options.case and (options.shape or options.arg):
        raise ConfigError(f"{op}: --case beside --shape or --arg\nFix: give one or the other.")
    if not whole_call:
        return Request(op, platform, signature_of(registry, op, options.dtype), traits_of(registry, op, options.trait))
    from tokenspeed_kernel.commands import call  # imports the op itself

    if not options.case:
        return call.request_of_shapes(registry, op, options.shape, options.dtype, options.arg)
    if len(options.dtype) > 1 or any("=" in text for text in options.dtype):
        raise ConfigError(f"{op}: --case takes one --dtype, for its inputs\nFix: write --dtype bf16.")
    return call.request_of_case(op, options.case, Format.parse((options.dtype or ["fp32"])[0]).storage)


def _lines(rank: int, candidate: Candidate, chosen: bool) -> Iterable[str]:
    spec = candidate.spec
    verdict = "chosen" if chosen else str(candidate.verdict)
    yield f"  {rank}. {spec.name}: {verdict} ({spec.band.name}, solution {spec.solution}; {verified_text(spec)})"
    if candidate.tuned:
        yield f"       {candidate.tuned}"
    yield from (f"       {reason.text}" for reason in candidate.reasons)
    yield from (f"       if {condition}" for condition in candidate.conditions)


COMMAND = Command("explain", "the kernels of an op in order of rank, each with why not", _add_arguments, _run, order=2)

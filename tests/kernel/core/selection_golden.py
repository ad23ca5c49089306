"""Which kernels are eligible for each op on pretended platforms, in order of rank, as text: one file for each family.

    python tests/kernel/core/selection_golden.py [FAMILY ...]

writes the files in `golden/` anew, all of them or those of some families. Read the difference before committing it: it is what
users will get. Libraries count as installed, and plugins as absent, so that the text is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tokenspeed_kernel import dispatch, selection
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.platform import parse_platform
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.registry import Registry, collect_builtin
from tokenspeed_kernel.selection import Request, Verdict, evaluate
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.verify import DTYPES, cases_of

PLATFORMS = (
    "cpu", "cpu+avx2", "cpu+avx2+avx512+bf16_dot", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx942", "gfx950",
)  # fmt: skip
FOLDER = Path(__file__).parent / "golden"


def families(registry: Registry) -> list[str]:
    """Families that have ops."""
    return sorted({op.partition(".")[0] for op in registry.ops()})


def golden(family: str) -> str:
    """The text of one family."""
    registry = collect_builtin().freeze()
    lines = []
    with dispatch.use_registry(registry):
        for op in (op for op in registry.ops() if op.startswith(f"{family}.")):
            lines.append(op)
            calls: dict[tuple[str, ...], list[str]] = {}  # those for which the same kernels are eligible stand together
            for request in _requests(op):
                calls.setdefault(tuple(_ranked(registry, request)), []).append(_call(request))
            for ranked, alike in calls.items():
                lines += [f"  {call}" for call in alike] + [f"    {line}" for line in ranked]
    return "\n".join([*lines, ""])


def _requests(op: str) -> Iterator[Request]:
    """What the small cases ask for: each combination of formats and options once, with the first sizes that come with it."""
    seen = set()
    found = False
    for case in cases_of(op):
        for dtype in () if case.bench else case.dtypes or DTYPES:
            try:
                inputs = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), dtype)
                request = request_of(public_op(op), inputs)
            except TokenSpeedKernelError:
                continue  # the op refuses this dtype
            if request is None:
                continue
            found = True
            options = {
                name: value for name, value in request.traits.items() if isinstance(value, (bool, str)) or value is None
            }
            key = (str(request.signature), tuple(options.items()))
            if key not in seen:
                seen.add(key)
                yield request
    if not found:
        yield Request(op, parse_platform("cpu"))


def _call(request: Request) -> str:
    traits = ", ".join(f"{name}={value}" for name, value in request.traits.items())
    return "; ".join(part for part in (str(request.signature or "any formats"), traits) if part)


def _ranked(registry: Registry, request: Request) -> Iterator[str]:
    """One line for each ranked list, with the platforms that have it."""
    lists: dict[tuple[str, ...], list[str]] = {}
    for name in PLATFORMS:
        asked = replace(request, platform=parse_platform(name), solution=None, config=KernelConfig())
        ranked = tuple(one.spec.name for one in evaluate(registry, asked) if one.verdict is Verdict.ELIGIBLE)
        lists.setdefault(ranked, []).append(name)
    for ranked, platforms in lists.items():
        yield f"{' '.join(platforms)}: {', '.join(ranked) or 'none'}"


def main(names: list[str]) -> None:
    """Write the files."""
    selection.library_problem = lambda library: None
    for family in names or families(collect_builtin()):
        (FOLDER / f"{family}.txt").write_text(golden(family), encoding="utf-8")
        print(FOLDER / f"{family}.txt")


if __name__ == "__main__":
    main(sys.argv[1:])

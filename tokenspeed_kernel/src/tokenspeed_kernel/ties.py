"""Ties: two kernels of one op with the same band and priority, and a call that fits both.

Two kernels of this package, or of one plugin, that tie are a mistake of their author and are refused. Two plugins that were
written apart cannot know of each other: between them the user decides, and until then neither is used for that op.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenspeed_kernel.errors import RegistrationError
from tokenspeed_kernel.platform import KNOWN_PLATFORMS, parse_platform
from tokenspeed_kernel.spec import Band, KernelSpec, OpContract
from tokenspeed_kernel.traits import ANY, AnyValue, Constraint, OneOf

__all__ = ["Tie", "effective_constraint", "find_ties", "refuse_ties", "undecided"]

_PLATFORMS = tuple(parse_platform(name) for name in KNOWN_PLATFORMS)


@dataclass(frozen=True, slots=True)
class Tie:
    """Two kernels between which rank does not decide.

    Args:
        op: `family.op`.
        first: one kernel, the one whose name sorts first.
        second: the other.
    """

    op: str
    first: KernelSpec
    second: KernelSpec


def effective_constraint(contract: OpContract, spec: KernelSpec, trait: str) -> Constraint | None:
    """What the kernel takes for the trait: its own constraint, the trait's default alone, or (None) everything."""
    constraint = spec.traits.get(trait)
    declared = contract.trait(trait)
    if constraint is not None or declared is None or declared.default is ANY or isinstance(declared.default, AnyValue):
        return constraint
    return None if spec.band is Band.REFERENCE else OneOf(declared.default)


def find_ties(contract: OpContract, specs: Iterable[KernelSpec]) -> Iterator[Tie]:
    """Yield every pair of kernels of the op that ties, in order of their names."""
    for first, second in itertools.combinations(sorted(specs, key=lambda spec: spec.name), 2):
        if (first.band, first.priority) == (second.band, second.priority) and _overlap(contract, first, second):
            yield Tie(contract.name, first, second)


def refuse_ties(contract: OpContract, specs: Iterable[KernelSpec]) -> None:
    """Refuse kernels of the op that tie.

    Raises:
        RegistrationError: two tie; both are named.
    """
    for tie in find_ties(contract, specs):
        raise RegistrationError(
            f"registry: {tie.first.name} and {tie.second.name} tie: both serve {contract.name} in band "
            f"{tie.first.band.name} with priority {tie.first.priority}, and some calls fit both\n"
            "Fix: give one a higher priority, or narrow its capability, formats or traits."
        )


def undecided(first_plugin: str, second_plugin: str, preferred: Sequence[str]) -> bool:
    """Say whether the user's preference leaves a tie between the two plugins open: it names neither."""
    return first_plugin not in preferred and second_plugin not in preferred


def _overlap(contract: OpContract, first: KernelSpec, second: KernelSpec) -> bool:
    if not first.capability.overlaps(second.capability, _PLATFORMS):
        return False
    if first.formats and second.formats:
        pairs = itertools.product(first.formats, second.formats)
        if not any(one.overlaps(other) for one, other in pairs):
            return False
    for trait in contract.traits:
        mine = effective_constraint(contract, first, trait.name)
        theirs = effective_constraint(contract, second, trait.name)
        if mine is not None and theirs is not None and not mine.overlaps(theirs):
            return False
    return True

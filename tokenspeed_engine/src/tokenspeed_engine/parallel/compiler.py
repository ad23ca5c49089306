"""Puts collectives between modules whose placements differ.

A module declares how it needs its input (`input_placement`) and how it leaves its output (`output_placement`). A block declares
in which order an activation passes through its modules (`flow`). The compiler walks the flow once, when the model is built, and
hangs the change that is needed on the producer; models and layers contain no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenspeed_engine.parallel.collectives import Collective, PlacementError, collective
from tokenspeed_engine.parallel.mesh import Mesh
from tokenspeed_engine.parallel.placement import Placement


class Placed(Protocol):
    """A module that states its placements.

    Attributes:
        input_placement: what it needs.
        output_placement: what it leaves, before `finish`.
        finish: applied to its output; set by the compiler, None when there is nothing to do.
    """

    input_placement: Placement
    output_placement: Placement
    finish: Collective | None


def compile_flow(flow: Sequence[tuple[str, Placed]], end: Placement, mesh: Mesh) -> list[str]:
    """Connect the modules that an activation passes in turn.

    Args:
        flow: (name, module) in order of use.
        end: the placement that is needed after the last one.
        mesh: the ranks.
    Returns:
        One line for each collective that was inserted, for logs and tests.
    Raises:
        PlacementError: two neighbours cannot be connected; both are named.
    """
    inserted = []
    for index, (name, module) in enumerate(flow):
        last = index + 1 == len(flow)
        needed = end if last else flow[index + 1][1].input_placement
        try:
            module.finish = collective(module.output_placement, needed, mesh)
        except PlacementError as error:
            follower = "the end" if last else flow[index + 1][0]
            raise PlacementError(f"{error} (between {name} and {follower})") from error
        if module.finish is not None:
            inserted.append(f"{name}: {module.output_placement} -> {needed}")
    return inserted

"""Changes of placement: the only places where ranks talk to each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_engine.parallel.mesh import Mesh
from tokenspeed_engine.parallel.placement import Partial, Placement, Replicate, Shard

Collective = Callable[[Tensor], Tensor]
"""Takes a rank's tensor in one placement and returns it in another."""


class PlacementError(ValueError):
    """No collective leads from one placement to the other."""


def collective(source: Placement, target: Placement, mesh: Mesh) -> Collective | None:
    """The change that leads from one placement of an activation to another.

    Args:
        source: what the producer leaves.
        target: what the consumer needs.
        mesh: the ranks.
    Returns:
        A function, or None when nothing has to be done (equal placements, or a single rank).
    Raises:
        PlacementError: there is no such change.
    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    if source == target or mesh.size == 1:
        return None
    match source, target:
        case Partial(), Replicate():
            return lambda x: _all_reduce(x, mesh)
        case Shard(dim=dim), Replicate():
            return lambda x: _all_gather(x, dim, mesh)
        case Replicate(), Shard(dim=dim):
            return lambda x: _own_part(x, dim, mesh)
        case Partial(), Shard(dim=dim):
            return lambda x: _own_part(_all_reduce(x, mesh), dim, mesh)
        case Shard(), Shard(dim=dim):
            return lambda x: _own_part(_all_gather(x, source.dim, mesh), dim, mesh)
        case _:
            raise PlacementError(f"placement: no collective leads from {source} to {target}")


def _all_reduce(x: Tensor, mesh: Mesh) -> Tensor:
    # In place: the producer's output is used nowhere else.
    dist.all_reduce(x, group=mesh.group)
    return x


def _all_gather(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(mesh.size)]
    dist.all_gather(parts, x, group=mesh.group)
    return torch.cat(parts, dim=dim)


def _own_part(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    size = x.shape[dim]
    if size % mesh.size:
        raise PlacementError(f"placement: dimension {dim} of {size} does not divide by {mesh.size} ranks")
    return x.narrow(dim, mesh.rank * (size // mesh.size), size // mesh.size).contiguous()

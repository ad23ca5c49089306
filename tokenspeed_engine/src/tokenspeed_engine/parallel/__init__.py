"""Tensor parallelism applied from outside of the models: placements are declared, collectives follow from them."""

from tokenspeed_engine.parallel.collectives import Collective, PlacementError, collective
from tokenspeed_engine.parallel.compiler import Placed, compile_flow
from tokenspeed_engine.parallel.mesh import Mesh
from tokenspeed_engine.parallel.parameter import Parameter, Part
from tokenspeed_engine.parallel.placement import Partial, Placement, Replicate, Shard

__all__ = [
    "Collective",
    "Mesh",
    "Parameter",
    "Part",
    "Partial",
    "Placed",
    "Placement",
    "PlacementError",
    "Replicate",
    "Shard",
    "collective",
    "compile_flow",
]

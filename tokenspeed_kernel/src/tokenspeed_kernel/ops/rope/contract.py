"""What the rope ops are: operands, parameters and traits."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

APPLY_ROPE: Final = OpContract(
    name="rope.apply_rope",
    operands=("q", "k", "cos_sin_cache"),
    parameters=("q", "k", "positions", "cos_sin_cache", "interleaved", "q_out", "k_out"),
    traits=(
        Trait("head_dim", "elements of one head"),
        Trait("rotary_dim", "leading elements of a head that are rotated"),
        Trait("interleaved", "a pair is two neighbours, not the same place in two halves"),
    ),
    summary="rotary position embedding of queries and keys",
)

MULTI_AXIS_COS_SIN: Final = OpContract(
    name="rope.multi_axis_cos_sin",
    operands=("cos_sin_cache",),
    parameters=("cos_sin_cache", "positions", "sections", "interleaved", "out"),
    traits=(Trait("num_axes", "axes that a position has a coordinate on"),),
    summary="cosines and sines of positions on several axes, each pair of elements following one of them",
)

CONTRACTS: Final = (APPLY_ROPE, MULTI_AXIS_COS_SIN)

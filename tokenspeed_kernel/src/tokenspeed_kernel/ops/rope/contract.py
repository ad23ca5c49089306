"""What the rope op is: operands, parameters and traits."""

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

CONTRACTS: Final = (APPLY_ROPE,)

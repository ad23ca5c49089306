"""The gate between the two products of an expert, as an option of the ops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe.contract import ACTIVATIONS

__all__ = ["GatedActivation"]


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """How gate and up become one: `f(gate) * (up + up_offset)`, after clamping.

    `swiglu` is `g * sigmoid(alpha * g) * (u + up_offset)` with `g = min(gate, limit)` and `u` = up within [-limit, limit], as
    `activation.swiglu_clamped`; `gelu` and `gelu_tanh` are `activation.gelu_and_mul`, and take no other option.

    Args:
        kind: `swiglu`, `gelu` or `gelu_tanh`.
        limit: above 0, dimensionless; infinity clamps nothing.
        alpha: steepness of the sigmoid; dimensionless.
        up_offset: added to the clamped up.
    Attributes:
        clamped: it is more than the plain gate.
    Raises:
        ShapeError: an unknown kind, a limit that is not above 0, or an option that the kind does not have.
    """

    kind: str = "swiglu"
    limit: float = math.inf
    alpha: float = 1.0
    up_offset: float = 0.0
    clamped: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        op = "moe.GatedActivation"
        if self.kind not in ACTIVATIONS:
            raise ShapeError(op, expected=f"kind in {{{', '.join(ACTIVATIONS)}}}", got=repr(self.kind))
        if not self.limit > 0:
            raise ShapeError(op, expected="limit > 0", got=f"{self.limit}", fix="leave limit out to clamp nothing")
        # Read for every call, so that it is not computed there.
        object.__setattr__(self, "clamped", (self.limit, self.alpha, self.up_offset) != (math.inf, 1.0, 0.0))
        if self.clamped and self.kind != "swiglu":
            raise ShapeError(op, expected=f"no limit, alpha or up_offset with {self.kind}", got=f"{self}")

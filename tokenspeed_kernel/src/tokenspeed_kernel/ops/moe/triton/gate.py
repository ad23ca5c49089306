"""The gate between the two products, on float32 tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.ops.activation.triton.gated import tanh

__all__ = ["gated"]


@triton.jit
def gated(gate, up, limit, alpha, up_offset, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr):
    """See `tokenspeed_kernel.ops.moe.GatedActivation`."""
    if ACTIVATION == "gelu_tanh":
        result = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    elif ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif CLAMPED:
        # Comparisons, not min and max: a NaN must stay one.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_offset)
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result

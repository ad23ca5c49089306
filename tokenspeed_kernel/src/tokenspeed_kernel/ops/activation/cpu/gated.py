"""The clamped SwiGLU and the GELU gate on the CPU, in float32."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

__all__ = ["gelu_and_mul", "swiglu_clamped"]


def swiglu_clamped(
    gate_up: torch.Tensor,
    limit: float,
    *,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.swiglu_clamped`."""
    if interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    # clamp makes a copy, which the rest may then change in place.
    gate = gate.float().clamp(max=limit)
    up = up.float().clamp(min=-limit, max=limit)
    activated = up.add_(up_offset).mul_(gate).mul_(gate.mul(alpha).sigmoid_())
    return activated.to(gate_up.dtype).contiguous() if out is None else out.copy_(activated)


def gelu_and_mul(gate_up: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = gelu(gate.float(), approximate=approximate).mul_(up)
    return activated.to(gate_up.dtype).contiguous() if out is None else out.copy_(activated)

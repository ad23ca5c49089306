"""SwiGLU on the CPU."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

__all__ = ["silu_and_mul"]


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.silu_and_mul`."""
    inner = gate_up.shape[-1] // 2
    gate, up = gate_up.narrow(-1, 0, inner), gate_up.narrow(-1, inner, inner)
    if gate_up.dtype is torch.float32:
        # The product goes into the activation's own buffer: one allocation less, and it is still in the cache.
        activated = silu(gate).mul_(up)
    else:
        activated = silu(gate.float()).mul_(up).to(gate_up.dtype)
    return activated.contiguous() if out is None else out.copy_(activated)

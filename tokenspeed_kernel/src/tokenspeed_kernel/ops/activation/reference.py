"""The truth for the activation ops: float64, rounded once."""

from __future__ import annotations

import torch

__all__ = ["silu_and_mul"]


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.silu_and_mul`."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = gate * torch.sigmoid(gate) * up
    return result.to(gate_up.dtype).contiguous() if out is None else out.copy_(result)

"""The truth for the activation ops: float64, rounded once."""

from __future__ import annotations

import torch

__all__ = ["gelu_and_mul", "silu_and_mul", "swiglu_clamped"]


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.silu_and_mul`."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return _rounded(gate * torch.sigmoid(gate) * up, gate_up, out)


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
    wide = gate_up.double()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return _rounded(gate * torch.sigmoid(alpha * gate) * (up + up_offset), gate_up, out)


def gelu_and_mul(gate_up: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.gelu_and_mul`."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return _rounded(torch.nn.functional.gelu(gate, approximate=approximate) * up, gate_up, out)


def _rounded(result: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result.to(gate_up.dtype).contiguous() if out is None else out.copy_(result)

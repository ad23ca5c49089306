"""Merging of attention states on the CPU, in float32 (float64 for float64 states)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial states; see the public op for the contract."""
    dtype = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack(list(lses)).to(dtype)
    top = stacked.amax(0)
    weights = torch.exp(stacked - torch.where(top == -math.inf, 0.0, top))
    total = weights.sum(0)
    merged = torch.zeros(outs[0].shape, dtype=dtype)
    for weight, one in zip(weights.unsqueeze(-1), outs, strict=True):
        # Not a product with 0: an output without weight may be NaN.
        merged += torch.where(weight > 0, one.to(dtype) * weight, 0.0)
    merged /= torch.where(total == 0, 1.0, total).unsqueeze(-1)
    lse = torch.where(total == 0, -math.inf, top + torch.log(total)).to(torch.float32)
    return (
        merged.to(outs[0].dtype) if out is None else out.copy_(merged),
        lse if lse_out is None else lse_out.copy_(lse),
    )

"""RMS norm. Replace the body with a call of your own kernel; keep the parameters."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None) -> torch.Tensor:
    """Scale each row of x to a root mean square of one, then by weight.

    Args:
        x: [..., hidden] fp32, bf16 or fp16, any strides.
        weight: [hidden], dtype of x.
        eps: added to the mean square.
        out: optional, shape and dtype of x, written in place; it may be x.
    Returns:
        out, or a new contiguous tensor.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype).contiguous() if out is None else out.copy_(normed)

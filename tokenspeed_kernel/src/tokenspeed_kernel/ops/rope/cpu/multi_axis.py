"""Cosines and sines of positions on several axes, on the CPU: one gather for all axes."""

from __future__ import annotations

import functools

import torch

from tokenspeed_kernel.ops.rope.axes import axis_of_pairs

__all__ = ["multi_axis_cos_sin"]


def multi_axis_cos_sin(
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    sections: tuple[int, ...],
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.rope.multi_axis_cos_sin`."""
    rows = positions.t()[:, _axes(sections, interleaved)].long()  # the row of the table for each element of each token
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= cos_sin_cache.shape[0]):
        message = f"multi_axis_cos_sin: positions must be in 0..{cos_sin_cache.shape[0] - 1}, got {positions.aminmax()}"
        raise IndexError(message)
    return torch.gather(cos_sin_cache, 0, rows, out=out) if out is not None else torch.gather(cos_sin_cache, 0, rows)


@functools.lru_cache(maxsize=64)
def _axes(sections: tuple[int, ...], interleaved: bool) -> torch.Tensor:
    with torch.inference_mode(False):  # whoever made it first
        return torch.tensor(axis_of_pairs(sections, interleaved) * 2, dtype=torch.int64)

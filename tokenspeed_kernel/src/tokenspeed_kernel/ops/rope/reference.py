"""The truth of the rope family: one element pair at a time, in float64."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.rope.axes import axis_of_pairs


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each pair by its position's angle; see the public op for the contract."""
    rotated_q = _rotate(q, positions, cos_sin_cache, interleaved)
    rotated_k = _rotate(k, positions, cos_sin_cache, interleaved)
    return _into(rotated_q, q_out), _into(rotated_k, k_out)


def _rotate(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cache.shape[1] // 2
    angles = cache.to(torch.float64)[positions.long()]
    result = x.to(torch.float64, copy=True)
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        cos, sin = angles[:, None, pair], angles[:, None, pair + half]
        a, b = result[:, :, first].clone(), result[:, :, second].clone()
        result[:, :, first] = a * cos - b * sin
        result[:, :, second] = b * cos + a * sin
    return result.to(x.dtype)


def _into(value: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return value if out is None else out.copy_(value)


def multi_axis_cos_sin(
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    sections: tuple[int, ...],
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One pair of elements at a time; see the public op for the contract."""
    axes = axis_of_pairs(sections, interleaved) * 2
    columns = [cos_sin_cache[positions[axis].long(), element] for element, axis in enumerate(axes)]
    return _into(torch.stack(columns, -1), out)

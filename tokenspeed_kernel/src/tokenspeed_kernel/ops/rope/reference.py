"""The truth of the rope family: one element pair at a time, in float64."""

from __future__ import annotations

import torch


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
    cache = cache.to(torch.float64)
    result = x.to(torch.float64, copy=True)
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            cos, sin = cache[position, pair], cache[position, pair + half]
            a, b = x[token, :, first].to(torch.float64), x[token, :, second].to(torch.float64)
            result[token, :, first] = a * cos - b * sin
            result[token, :, second] = b * cos + a * sin
    return result.to(x.dtype)


def _into(value: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return value if out is None else out.copy_(value)

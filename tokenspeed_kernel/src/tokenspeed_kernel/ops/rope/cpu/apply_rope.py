"""Rotary embedding on the CPU with PyTorch's vector operations."""

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
    """Rotate q and k by their positions; see the public op for the contract."""
    angles = cos_sin_cache.index_select(0, positions)
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    in_place = q_out is q and k_out is k
    if (in_place or (q_out is None and k_out is None)) and _adjacent(q, k):
        # q and k are neighbouring slices of one projection: rotate them as one tensor, in half as many calls.
        num_heads = q.shape[1]
        both = q.as_strided((q.shape[0], num_heads + k.shape[1], q.shape[2]), q.stride())
        rotated = _rotate(both, cos, sin, interleaved, both if in_place else None)
        return (q, k) if in_place else (rotated[:, :num_heads], rotated[:, num_heads:])
    return _rotate(q, cos, sin, interleaved, q_out), _rotate(k, cos, sin, interleaved, k_out)


def _adjacent(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether k's heads follow q's in memory, token by token."""
    return (
        q.dtype == k.dtype
        and q.stride() == k.stride()
        and q.stride(1) == q.shape[2]
        and k.storage_offset() == q.storage_offset() + q.shape[1] * q.shape[2]
        and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, out: torch.Tensor | None) -> torch.Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        # half-precision arithmetic is slow here and would round twice
        rotated = _rotate(x.to(torch.float32), cos, sin, interleaved, None)
        return rotated.to(x.dtype) if out is None else out.copy_(rotated)
    if x.dtype == torch.float64:
        cos, sin = cos.to(torch.float64), sin.to(torch.float64)
    half = cos.shape[2]
    first, second = _halves(x, half, interleaved)
    if out is x:
        kept = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(kept)
        return x
    # Where an output only overlaps its input, the first product must not overwrite what the second reads.
    target = torch.empty(x.shape, dtype=x.dtype) if out is None or _overlaps(out, x) else out
    out_first, out_second = _halves(target, half, interleaved)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    if 2 * half < x.shape[2]:
        target[..., 2 * half :].copy_(x[..., 2 * half :])
    return target if out is None or out is target else out.copy_(target)


def _halves(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second elements of all pairs."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()

"""Rotary embedding of float32 heads; see `tokenspeed_kernel.ops.rope` for the contract."""

from __future__ import annotations

import torch
from torch import get_num_threads

from tokenspeed_kernel_cpu import _kernels


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
    """Rotate queries and keys by the angles of their positions.

    Raises:
        IndexError: a position is not a row of the table; nothing is written.
    """
    q_to, k_to = _target(q, q_out, k), _target(k, k_out, q)
    tokens, num_heads, head_dim = q.shape
    max_position, rotary_dim = cos_sin_cache.shape
    q_token, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    q_to_token, q_to_head, _ = q_to.stride()
    k_to_token, k_to_head, _ = k_to.stride()
    wrong = _kernels.apply_rope(
        q.data_ptr(), q_to.data_ptr(), num_heads, q_token, q_head, q_to_token, q_to_head,
        k.data_ptr(), k_to.data_ptr(), k.shape[1], k_token, k_head, k_to_token, k_to_head,
        positions.data_ptr(), positions.stride(0), positions.dtype is torch.int64,
        cos_sin_cache.data_ptr(), max_position, rotary_dim, head_dim, interleaved, tokens, get_num_threads(),
    )  # fmt: skip
    if wrong is not None:
        raise IndexError(f"rope.apply_rope: expected positions in 0..{max_position - 1}, got {wrong}\nFix: build a longer table.")
    if q_out is not None and q_to is not q_out:
        q_to = q_out.copy_(q_to)
    if k_out is not None and k_to is not k_out:
        k_to = k_out.copy_(k_to)
    return q_to, k_to


def _target(x: torch.Tensor, out: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Where to write: `out`, or a new tensor where `out` may overlap what is still to be read."""
    if out is x:
        return x
    if out is None or any(out.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in (x, other)):
        return torch.empty(x.shape, dtype=torch.float32, device="cpu")
    return out

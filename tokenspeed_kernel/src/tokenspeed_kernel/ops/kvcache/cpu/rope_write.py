"""Rotary embedding and cache write on the CPU: the kernels of both, one after the other."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.kvcache.cpu.scaled import write_scaled_kv
from tokenspeed_kernel.ops.kvcache.cpu.write_kv import write_kv
from tokenspeed_kernel.ops.rope.cpu.apply_rope import apply_rope

__all__ = ["rope_write_kv"]


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.kvcache.rope_write_kv`."""
    # A rotated key is not kept: where q is rotated in place, k must not be.
    rotated_q, rotated_k = apply_rope(q, k, positions, cos_sin_cache, interleaved=interleaved, q_out=q_out)
    if k_scale is None or v_scale is None:
        write_kv(rotated_k, v, k_cache, v_cache, slot_mapping)
    else:
        write_scaled_kv(rotated_k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return rotated_q

"""Rotation of rope parts and write of latent rows on the CPU: the kernels of both, one after the other."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.mla.cpu.write import write_mla_cache
from tokenspeed_kernel.ops.rope.cpu.apply_rope import apply_rope

__all__ = ["rope_write_mla"]


def rope_write_mla(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.mla.rope_write_mla`."""
    key = k_rope[:, None]
    rotated_q, rotated_k = apply_rope(q_rope, key, positions, cos_sin_cache, interleaved=interleaved, q_out=q_out)
    write_mla_cache(latent, rotated_k[:, 0], kv_cache, slot_mapping)
    return rotated_q

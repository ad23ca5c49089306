"""Rotation of rope parts and write of latent rows on Hopper: the portable kernel; few tokens are a chained launch.

Floor of one call with T tokens: bytes alone, 2 T (Hq rope_dim + latent_dim + rope_dim) elements. Few tokens are less than a launch.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.mla.triton.rope_write import launch

__all__ = ["rope_write_mla"]

# Tuned on an H200: perf/baselines/h200/hopper.rope_write.txt.
_CHAINED_TOKENS = 256


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
    chained = q_rope.shape[0] <= _CHAINED_TOKENS and q_rope.device.type == "cuda"
    operands = (q_rope, k_rope, latent, positions, cos_sin_cache, kv_cache, slot_mapping)
    return launch(*operands, interleaved, q_out, chained=chained)

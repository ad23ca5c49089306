"""Rotation and cache write on Hopper: the portable kernel in sizes of this chip; few tokens are a chained launch.

Floor of one call with T tokens: bytes alone, (2 Hq + 2 Hkv) T head_dim elements read or written at the tokens' size, and
2 Hkv T head_dim at the cache's. Two kernels one after the other write and read Hkv T head_dim elements more: at 32/8 heads of 128
in bf16 that is 28 KB a token against 24. Few tokens are less than a launch: one instead of two is the whole of it.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.kvcache.triton.rope_write import launch

__all__ = ["rope_write_kv"]

# Tuned on an H200: perf/baselines/h200/hopper.rope_write.txt. A chained launch waits on the multiprocessors of the one before it;
# where that has several programs for each place, they are in the way.
_CHAINED_TOKENS = 256
_FEW_PAIRS, _MANY_PAIRS = 512, 1024
"""Pairs of elements that a program rotates, of few tokens and of many."""


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
    few = q.shape[0] <= _CHAINED_TOKENS
    operands = (q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping)
    chained = few and q.device.type == "cuda"
    return launch(*operands, interleaved, k_scale, v_scale, q_out, chained, _FEW_PAIRS if few else _MANY_PAIRS)

"""Launch sizes of the kernels that walk a row of logits."""

from __future__ import annotations

import triton

# 16 warps of one program are what one row can keep in flight on an SM; 8 elements a thread give two 16-byte loads.
_MAX_BLOCK = 4096


def launch_size(vocab_size: int) -> tuple[int, int]:
    """Return (BLOCK, num_warps) for rows of that many logits."""
    block = min(max(triton.next_power_of_2(vocab_size), 16), _MAX_BLOCK)
    return block, min(max(block // 256, 1), 16)

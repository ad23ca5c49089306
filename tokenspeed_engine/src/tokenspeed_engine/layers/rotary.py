"""Rotary position embedding, one table for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_engine.layers.module import Module
from tokenspeed_kernel.ops.rope import RopeConfig, apply_rope, rope_cos_sin


class Rotary(Module):
    """Rotates queries and keys in place.

    Args:
        config: frequencies and scaling.
    """

    def __init__(self, config: RopeConfig) -> None:
        self.config = config

    def build(self, max_len: int, device: torch.device) -> None:
        """Compute the table for positions 0..max_len-1.

        Raises:
            ValueError: dynamic scaling beyond the configured length, where the frequencies depend on each sequence's length
            and keys that are already cached would have to be rotated again.
        """
        if self.config.kind == "dynamic" and max_len > self.config.max_position:
            raise ValueError(
                f"rope: dynamic scaling with {max_len} positions: expected at most {self.config.max_position}, beyond which "
                f"cached keys would have to be rotated again. Fix: --max-model-len {self.config.max_position}."
            )
        self._cos_sin = rope_cos_sin(self.config, max_len).to(device)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        """Rotate q [T, Hq, D] and k [T, Hk, D] in place."""
        apply_rope(q, k, positions, self._cos_sin, q_out=q, k_out=k)

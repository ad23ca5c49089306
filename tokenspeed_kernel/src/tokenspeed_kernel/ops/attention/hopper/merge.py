"""Merging of attention states on Hopper: the portable kernel as a chained launch.

Floor of one call of n states: (n + 1) num_tokens num_heads head_dim elements read or written, and their LSEs. Few tokens are less
than a launch, of which chaining hides the greater part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed_kernel.ops.attention.triton.merge import launch

__all__ = ["merge_states"]


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.merge_states`."""
    return launch(outs, lses, out, lse_out, chained=outs[0].device.type == "cuda")

"""Cases of the merging of attention states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.attention.contract import MERGE_STATES

__all__ = ["MERGE_CASES", "states"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def states(
    num_states: int, *shape: int, empty: float = 0.0, low: float = 0.0, stacked: bool = False, strided: bool = False
) -> _Build:
    """Make inputs of `merge_states`.

    States of that shape; a part ``empty`` of the rows saw no key (LSE -inf, output NaN), logits lie around ``low``.
    """

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        wide = (*shape[:-1], 2 * shape[-1]) if strided else shape
        outs = torch.randn((num_states, *wide), generator=generator)
        lses = torch.randn((num_states, *shape[:-1]), generator=generator) * 3 + low
        hidden = torch.rand((num_states, *shape[:-1]), generator=generator) < empty
        lses[hidden] = -math.inf
        outs[hidden] = math.nan
        outs = outs.to(device, dtype)
        if strided:  # rows with gaps, and LSEs with the heads outermost
            outs = outs[..., : shape[-1]]
            lses = lses.transpose(1, 2).contiguous().transpose(1, 2)
        lses = lses.to(device)
        if stacked:
            return {"outs": list(outs.unbind(0)), "lses": list(lses.unbind(0))}
        # Memory of their own: as states from different calls.
        own = list if strided else lambda stack: [one.clone() for one in stack]
        return {"outs": own(outs), "lses": own(lses)}

    return build


MERGE_CASES: Final = tuple(
    Case(MERGE_STATES.name, label, build, outputs=("out", "lse_out"), bench=bench)
    for label, build, bench in (
        ("no row", states(2, 0, 4, 16), False),
        ("one state", states(1, 3, 2, 16), False),
        ("two states", states(2, 5, 4, 64), False),
        ("two states, half of them empty", states(2, 40, 3, 16, empty=0.5), False),
        ("two states, all empty", states(2, 3, 2, 16, empty=2.0), False),
        ("one empty state", states(1, 3, 2, 16, empty=2.0), False),
        ("three states, most empty", states(3, 30, 3, 16, empty=0.7), False),
        ("seven states, stacked", states(7, 9, 2, 32, empty=0.3, stacked=True), False),
        ("odd sizes", states(3, 5, 3, 37), False),
        ("one element", states(2, 7, 1, 1), False),
        ("strided", states(3, 6, 4, 24, empty=0.2, strided=True), False),
        ("logits of -6e4", states(2, 5, 2, 16, low=-6e4), False),
        ("logits of 6e4", states(2, 5, 2, 16, low=6e4), False),
        ("latent rows", states(4, 3, 16, 512), False),
        ("two of 4096x32x128", states(2, 4096, 32, 128, empty=0.1), True),
        ("eight of 64x128x512", states(8, 64, 128, 512), True),
    )
)
"""Every kernel of `merge_states` meets these."""

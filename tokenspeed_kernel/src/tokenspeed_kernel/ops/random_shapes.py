"""Random sizes and layouts for the families' `random_cases.py`: mostly small, and near what kernels are blocked by."""

from __future__ import annotations

import random
from typing import Final

import torch

__all__ = ["random_layout", "random_size", "scaled_randn"]

_BLOCKS: Final = (2, 4, 8, 16, 32, 64, 128, 256)


def random_size(rng: random.Random, high: int, low: int = 1, multiple: int = 1) -> int:
    """Return a size from `low` to `high`, a multiple of `multiple`: often one of the bounds, a block, or one off a block."""
    near = [block + off for block in _BLOCKS for off in (-1, 0, 1)]
    picked = rng.choice([low, high, rng.randint(low, high), rng.randint(low, high), *rng.sample(near, 2)])
    return min(max(picked // multiple * multiple, -(-low // multiple) * multiple), high // multiple * multiple)


def random_layout(rng: random.Random, tensor: torch.Tensor, *, last_contiguous: bool = False) -> torch.Tensor:
    """Return the same values with other strides: as they are, in a wider row, every second element, or transposed.

    Args:
        rng: decides.
        tensor: values.
        last_contiguous: leave the last dimension contiguous.
    """
    kinds = ["contiguous", "contiguous", "padded"] + ([] if last_contiguous else ["gaps", "transposed"])
    kind = rng.choice(kinds)
    if tensor.dim() == 0 or kind == "contiguous":
        return tensor
    if kind == "transposed":
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    step, margin = (2, 1) if kind == "gaps" else (1, rng.randint(1, 9))
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * step + margin), float("nan"))
    view = wide.to(tensor.device, tensor.dtype)[..., margin:][..., ::step] if tensor.is_floating_point() else None
    if view is None or view.shape != tensor.shape:
        return tensor
    view.copy_(tensor)
    return view


def scaled_randn(rng: random.Random, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return normal values, now and then with rows of zeros or of another magnitude."""
    values = torch.randn(*shape, generator=generator)
    kind = rng.choice(("plain", "plain", "zero row", "large row", "small"))
    if values.dim() > 1 and values.shape[0] > 0 and kind in ("zero row", "large row"):
        values[rng.randrange(values.shape[0])] *= 0.0 if kind == "zero row" else 30.0
    return values * 1e-3 if kind == "small" else values

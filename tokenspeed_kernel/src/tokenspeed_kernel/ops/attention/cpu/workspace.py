"""Scratch memory that survives from layer to layer and from step to step.

Fresh buffers of some megabytes come from the operating system page by page, which costs as much as the arithmetic on them, and
they are cold; these stay in the cache. Each thread has its own. A buffer is handed out again at the next `take` of its name:
nothing that a kernel returns may lie in it.
"""

from __future__ import annotations

import threading

import torch

_KEPT_BYTES = 64 << 20


class Workspace(threading.local):
    """Named flat buffers, grown as needed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with undefined contents; anything larger than the limit is fresh and not kept."""
        numel = 1
        for size in shape:
            numel *= size
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            if numel * dtype.itemsize > _KEPT_BYTES:
                return torch.empty(shape, dtype=dtype)
            buffer = self._buffers[(name, dtype)] = torch.empty(numel + numel // 4, dtype=dtype)
        return buffer[:numel].view(shape)


WORKSPACE = Workspace()

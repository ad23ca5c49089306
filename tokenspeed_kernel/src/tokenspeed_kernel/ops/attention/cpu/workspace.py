"""Scratch memory that survives from layer to layer and from step to step.

Fresh buffers of some megabytes come from the operating system page by page, which costs as much as the arithmetic on them, and
they are cold; these stay in the cache. Each thread has its own. A buffer is handed out again at the next `take` of its name:
nothing that a kernel returns may lie in it.
"""

from __future__ import annotations

import math
import threading

import torch

_KEPT_BYTES = 64 << 20
_KEPT_VIEWS = 256


class Workspace(threading.local):
    """Named flat buffers, grown as needed, and the views of them that were asked for lately."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with undefined contents; anything larger than the limit is fresh and not kept."""
        view = self._views.get((name, shape, dtype))
        return self._make(name, shape, dtype) if view is None else view

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            if numel * dtype.itemsize > _KEPT_BYTES:
                return torch.empty(shape, dtype=dtype)
            with torch.inference_mode(False):  # whoever made it first, later calls may run outside of inference mode
                buffer = self._buffers[(name, dtype)] = torch.empty(numel + numel // 4, dtype=dtype)
            self._views.clear()  # they would keep the smaller buffer alive
        if len(self._views) >= _KEPT_VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            view = self._views[(name, shape, dtype)] = buffer[:numel].view(shape)
        return view


WORKSPACE = Workspace()

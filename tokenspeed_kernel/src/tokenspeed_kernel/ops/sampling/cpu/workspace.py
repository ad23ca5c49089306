"""Buffers for passes over whole rows, kept from call to call: fresh megabytes would cost more in page faults than the passes."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class _Workspace(threading.local):
    """One thread's buffers, by name. What `take` gives is overwritten by the next `take` of that name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with undefined contents."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # A tensor made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


WORKSPACE = _Workspace()

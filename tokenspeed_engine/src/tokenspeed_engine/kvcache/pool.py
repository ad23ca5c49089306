"""The memory that holds keys and values of all layers, in pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes of a cache line: a vector that crosses one is read twice


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's keys and values take.

    Attributes:
        num_layers: layers that cache.
        num_kv_heads: KV heads on this rank.
        head_dim: elements of a head.
        page_size: tokens in a page.
        dtype: element type of the cache.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Keys and values of all layers. Pages are handed out by the scheduler; this object only holds the memory.

    Args:
        layout: shape of a page.
        num_pages: pages in the pool.
        device: where it lives.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        if num_pages < 1:
            raise ValueError(f"kv pool: expected at least 1 page, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self._pending: list[list[torch.cuda.Event]] = []
        shape = (layout.num_layers, 2, num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
        # Zeros, not empty: masked tails of pages enter products, and NaN times zero is NaN.
        if device.type == "cpu":
            self._storage = _zeros_on_demand(shape, layout.dtype)
        else:
            self._storage = torch.zeros(shape, dtype=layout.dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._storage]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of a layer, each [num_pages, page_size, num_kv_heads, head_dim].

        Copies into the pool that `wait_for_layers` was told of are waited for, as far as they concern this layer: the current
        stream waits, not the caller.
        """
        if self._pending:
            self._wait(index)
        return self._layers[index]

    @property
    def rows(self) -> Tensor:
        """[num_layers * 2 * num_pages, elements]: row (layer * 2 + (0 for keys, 1 for values)) * num_pages + page."""
        return self._storage.view(self.layout.num_layers * 2 * self.num_pages, -1)

    def wait_for_layers(self, events: Sequence[torch.cuda.Event]) -> None:
        """Let whoever asks for a layer from now on wait for its event.

        Args:
            events: one for each layer, recorded behind the copies into it, in the order of the layers on one stream.
        """
        self._pending.append(list(events))

    def _wait(self, index: int) -> None:
        stream = torch.cuda.current_stream(self.device)
        for events in self._pending:
            stream.wait_event(events[index])
        if index == self.layout.num_layers - 1:
            # Layers are asked for in order, and the last event of a copy stands behind its others: later steps need not wait.
            self._pending.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.layout.page_bytes


def _zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take physical memory only where they were written: a pool is larger than what most of its life needs.

    `torch.zeros` writes them all.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size_bytes]).view(dtype).view(shape)

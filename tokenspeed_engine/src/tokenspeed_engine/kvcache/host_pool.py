"""Pages of keys and values in the host's memory: the second tier."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.kvcache.pool import KVLayout
from tokenspeed_engine.kvcache.sizing import available_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_RESERVE_SHARE = 0.9  # of what is available: the rest is for everything else that a process allocates while it serves


class HostPoolError(MemoryError):
    """The host has no room for the pool, or the device's driver does not pin it; the message gives sizes and the remedy."""


class HostPool:
    """Keys and values of all layers, page by page, in the host's memory.

    A page is one piece of memory here, [num_layers, 2, page_size, num_kv_heads, head_dim], because an external store takes and
    gives whole pages. What is moved to and from a device at once is one layer's keys or values of a page, a row of `rows`, which is
    contiguous in both pools.

    Args:
        layout: of the device's pool.
        num_pages: pages, at least 1.
        device: whose pages come here. For a GPU the memory is pinned: it is registered with the driver where it lies, since torch's
            own pinned memory is rounded up to a power of two.
    Raises:
        HostPoolError: too little memory, or the driver refused to pin it.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        if num_pages < 1:
            raise ValueError(f"host pool: expected at least 1 page, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        size = num_pages * layout.page_bytes
        available = available_bytes()
        if size > available * _RESERVE_SHARE:
            raise HostPoolError(
                f"host pool: {num_pages:,} pages take {size:,} bytes, {available:,} are available on the host. "
                "Fix: lower --host-cache-gib"
            )
        # Anonymous memory takes physical pages when it is written; pinned, all at once.
        self._memory = mmap.mmap(-1, size)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        shape = (num_pages, layout.num_layers, 2, layout.page_size, layout.num_kv_heads, layout.head_dim)
        self._storage = torch.from_numpy(self._bytes).view(layout.dtype).view(shape)
        self._pinned_on: torch.device | None = None
        if device.type == "cuda":
            self._pin(device)

    @property
    def rows(self) -> Tensor:
        """[num_pages * num_layers * 2, elements]: row (page * num_layers + layer) * 2 + (0 for keys, 1 for values)."""
        return self._storage.view(self.num_pages * self.layout.num_layers * 2, -1)

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.layout.page_bytes

    def page(self, index: int) -> NDArray[np.uint8]:
        """[page_bytes] uint8, a view of one page that may be written.

        Whoever uses it must hold the page: the scheduler gives it to nobody else, and no copy of the device is under way.
        """
        if not 0 <= index < self.num_pages:
            raise IndexError(f"host pool: expected a page in 0..{self.num_pages - 1}, got {index}")
        size = self.layout.page_bytes
        return self._bytes[index * size : (index + 1) * size]

    def close(self) -> None:
        """Take the memory back from the driver; no copy may be under way. The memory itself goes with the last view of it."""
        if self._pinned_on is not None:
            with torch.cuda.device(self._pinned_on):
                torch.cuda.cudart().cudaHostUnregister(self._bytes.ctypes.data)  # type: ignore[no-untyped-call]
            self._pinned_on = None

    def _pin(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            status = int(torch.cuda.cudart().cudaHostRegister(self._bytes.ctypes.data, self.size_bytes, _PORTABLE))  # type: ignore[no-untyped-call]
        if status != 0:
            raise HostPoolError(
                f"host pool: the driver of {device} does not pin {self.size_bytes:,} bytes (cudaHostRegister: error {status}). "
                "Fix: lower --host-cache-gib, or raise the limit of locked memory (ulimit -l)"
            )
        self._pinned_on = device


def num_host_pages_for(host_cache_gib: float, layout: KVLayout) -> int:
    """How many pages a configured size holds.

    Args:
        host_cache_gib: GiB; 0 means no second tier.
        layout: of a page.
    Returns:
        Pages; 0 without a second tier.
    Raises:
        HostPoolError: not one page fits into a size that is not 0.
    """
    if host_cache_gib == 0:
        return 0
    num_pages = int(host_cache_gib * 2**30) // layout.page_bytes
    if num_pages < 1:
        raise HostPoolError(
            f"host pool: --host-cache-gib {host_cache_gib:g} is {int(host_cache_gib * 2**30):,} bytes, one page of "
            f"{layout.page_size} tokens takes {layout.page_bytes:,}. Fix: give more, or use a smaller --block-size"
        )
    return num_pages

"""How much shared memory a block may use on a device."""

from __future__ import annotations

import functools

import torch
import triton

__all__ = ["shared_bytes"]

_INTERPRETED = 65536


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory of one block; the smallest of all GPUs under the interpreter."""
    if device.type == "cpu":
        return _INTERPRETED
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])

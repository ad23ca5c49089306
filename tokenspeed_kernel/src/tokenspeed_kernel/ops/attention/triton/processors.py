"""How many programs run at once."""

from __future__ import annotations

import functools

import torch

__all__ = ["num_processors"]

_INTERPRETED_PROCESSORS = 4


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; a few under the interpreter, so that keys are shared there too."""
    if device.type == "cpu":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

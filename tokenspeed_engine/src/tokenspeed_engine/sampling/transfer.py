"""Small host arrays to the sampler's device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`; on the CPU it shares the array's memory. Does not wait for the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)

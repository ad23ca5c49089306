"""NumPy arrays of the control plane as tensors, without a copy."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@functools.cache
def _silence_readonly_warning() -> None:
    """Let torch give its warning about read-only arrays, which it gives once in a process, where nobody sees it."""
    array = np.zeros(1, dtype=np.int32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(array)


def tensor_view(array: NDArray[Any]) -> torch.Tensor:
    """A CPU tensor over the array's memory.

    The scheduler's arrays are read-only and torch has no such tensors: whoever takes the view must not write to it.
    """
    _silence_readonly_warning()
    return torch.from_numpy(array)

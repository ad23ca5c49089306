"""Checks of operands that the ops of this family share."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.errors import ShapeError


def logits_shape(op: str, logits: Tensor) -> tuple[int, int]:
    """Return (R, V).

    Raises:
        ShapeError: not two dimensions, or an empty vocabulary.
    """
    shape = logits.shape
    if len(shape) != 2 or not shape[1]:
        raise ShapeError(op, expected="logits [R, V] with V >= 1", got=str(list(shape)))
    return shape[0], shape[1]


def require(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ShapeError unless the tensor has the shape, the dtype and the device."""
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        got = f"{list(tensor.shape)} {_short(tensor.dtype)} on {tensor.device}"
        raise ShapeError(op, expected=f"{name} {list(shape)} {_short(dtype)} on {device}", got=got)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Saying which operand of a linear-attention op does not fit; the checks themselves stand in each op, on its hot path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from tokenspeed_kernel.errors import ShapeError

__all__ = ["check_out", "refuse"]

Expectation = tuple[str, torch.Tensor | None, str, bool, str | None]
"""(name, operand, what it should be, whether it is that, remedy)."""


def refuse(op: str, expectations: Sequence[Expectation]) -> NoReturn:
    """Raise for the first expectation that does not hold.

    Raises:
        ShapeError: always.
    """
    for name, operand, expected, holds, fix in expectations:
        if not holds:
            raise ShapeError(op, expected=f"{name} {expected}", got=_shown(operand), fix=fix)
    raise AssertionError(f"unreachable: {op} refused an operand, but every check of it passes")


def check_out(op: str, like: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse an output that is not like `like`.

    Raises:
        ShapeError: shape, dtype, device or the last stride is another.
    """
    fits = out.shape == like.shape and out.dtype is like.dtype and out.device == like.device
    if not fits or (out.numel() > 0 and out.stride(-1) != 1):
        expected = f"out {list(like.shape)} {str(like.dtype).removeprefix('torch.')} on {like.device}, last dimension contiguous"
        raise ShapeError(op, expected=expected, got=_shown(out), fix="leave out away, or make it with torch.empty_like")


def _shown(operand: torch.Tensor | None) -> str:
    if operand is None:
        return "none"
    dtype = str(operand.dtype).removeprefix("torch.")
    return f"{list(operand.shape)} {dtype} with strides {list(operand.stride())}"
